#!/usr/bin/env bash
# The single hands-off command: bootstraps if needed, then checks, smokes, trains and hands over.
set -euo pipefail
cd "$(dirname "$0")/.."
echo "[tamis] starting in $PWD"
bash scripts/prime_bootstrap.sh --from-script
exec .venv/bin/tamis run "$@"
