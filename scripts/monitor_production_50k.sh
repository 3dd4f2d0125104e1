#!/usr/bin/env bash
# The live dashboard of the production run: bash scripts/monitor_production_50k.sh [RUN] [--once|--json]
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/tamis ] || bash scripts/prime_bootstrap.sh --from-script
case "${1:-}" in ""|-*) set -- artifacts/m7c_125m_2xa100_prod "$@" ;; esac
exec .venv/bin/tamis monitor "$@"
