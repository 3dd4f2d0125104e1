#!/usr/bin/env bash
# TensorBoard over a run's curves, reachable from this machine alone: bash scripts/run_tensorboard.sh [LOGDIR] [PORT]
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/tamis ] || bash scripts/prime_bootstrap.sh
logdir=${1:-artifacts/m7c_125m/tb}
port=${2:-6006}
if ! ls "$logdir"/events.out.tfevents.* >/dev/null 2>&1; then
  echo "[tensorboard] no event files in $logdir yet: they are written every train.log_every steps (train.tensorboard: true)"
  echo "[tensorboard] runs with curves: $(find artifacts -name 'events.out.tfevents.*' -printf '%h\n' 2>/dev/null | sort -u | tr '\n' ' ')"
fi
echo "[tensorboard] from your own machine: ssh -L $port:localhost:$port $(id -un)@<this host>, then open http://localhost:$port"
exec .venv/bin/tensorboard --logdir "$logdir" --host 127.0.0.1 --port "$port"
