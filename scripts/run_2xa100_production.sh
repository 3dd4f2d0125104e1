#!/usr/bin/env bash
# The production run by phases, micro-batch 1 per GPU; deletes nothing. Further words go to `tamis launch`.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/tamis ] || bash scripts/prime_bootstrap.sh --from-script
export CONFIG=${CONFIG:-configs/m7c_125m_2xa100_production.yaml}
exec .venv/bin/tamis launch --phases "$@"
