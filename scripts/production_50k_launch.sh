#!/usr/bin/env bash
# The whole production launch: bootstrap, causality, preflight, phases 0 to 3, summary, bundle. Run again, it continues.
# Further words go to `tamis launch`: bash scripts/production_50k_launch.sh --detach
set -euo pipefail
cd "$(dirname "$0")/.."
export CONFIG=${CONFIG:-configs/m7c_125m_2xa100_production.yaml}
echo "[tamis] production launch of $CONFIG"
bash scripts/prime_bootstrap.sh --from-script
.venv/bin/tamis launch "$@" --help >/dev/null  # refuses a mistyped flag before the tests
case " $* " in *" --help "*) exec .venv/bin/tamis launch --help ;; esac
.venv/bin/tamis check --quick "$CONFIG" || { echo "[tamis] not launched: see the failed checks above"; exit 1; }
bash scripts/run_gpu_causality_test.sh || { echo "[tamis] not launched: the causality test failed"; exit 1; }
mkdir -p artifacts
ln -sfn m7c_125m_2xa100_prod/train.log artifacts/production_50k_FINAL.log  # the name that the launch report uses
exec .venv/bin/tamis launch --phases "$@"
