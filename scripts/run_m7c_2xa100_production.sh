#!/usr/bin/env bash
# The production run by phases with the tuned config, micro-batch 4 per GPU. Further words go to `tamis launch`.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/tamis ] || bash scripts/prime_bootstrap.sh --from-script
if [ -z "${CONFIG:-}" ]; then
  export CONFIG=configs/m7c_125m_2xa100_production_tuned.yaml
  # The runbooks' tail, monitor and .HALT look here. By hand the tuned config writes to its own out_dir.
  set -- train.out_dir=artifacts/m7c_125m_2xa100_prod "$@"
fi
exec .venv/bin/tamis launch --phases "$@"
