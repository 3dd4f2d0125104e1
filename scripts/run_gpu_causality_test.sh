#!/usr/bin/env bash
# Nothing of the future reaches the past, on this device: bash scripts/run_gpu_causality_test.sh [--full]
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/tamis ] || bash scripts/prime_bootstrap.sh --from-script
export CONFIG=${CONFIG:-configs/m7c_125m_2xa100_production.yaml}
exec .venv/bin/tamis causality "$@"
