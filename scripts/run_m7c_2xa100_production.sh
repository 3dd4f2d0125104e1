#!/usr/bin/env bash
# The production run by phases with the tuned config, micro-batch 4 per GPU. Further words go to `tamis launch`.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/tamis ] || bash scripts/prime_bootstrap.sh
export CONFIG=${CONFIG:-configs/m7c_125m_2xa100_production_tuned.yaml}
exec .venv/bin/tamis launch --phases "$@"
