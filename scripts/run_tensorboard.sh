#!/usr/bin/env bash
# TensorBoard over a run's curves, reachable from this machine alone: bash scripts/run_tensorboard.sh [LOGDIR] [PORT]
set -euo pipefail
cd "$(dirname "$0")/.."
refuse() { echo "error: $*" >&2; exit 2; }
# find would take a word that begins with - for one of its actions, such as -delete.
usage="usage: bash scripts/run_tensorboard.sh [LOGDIR] [PORT]"
case "${1:-}" in -h|--help) echo "$usage"; exit ;; -*) refuse "$1 is not a directory; $usage" ;; esac
[ -x .venv/bin/tamis ] || bash scripts/prime_bootstrap.sh --from-script
logdir=${1:-artifacts/m7c_125m/tb} port=${2:-6006}
curves=$(find artifacts "$logdir" -name 'events.out.tfevents.*' -printf '%h\n' 2>/dev/null | sort -u | tr '\n' ' ') || true
# A directory that was named and is not there is a typing error; the usual one appears when the run begins.
[ -d "$logdir" ] || [ $# -eq 0 ] || refuse "$logdir is not a directory; there are curves in: ${curves:-no directory yet}"
[[ "$port" =~ ^[0-9]+$ ]] || refuse "the port must be a number, got $port"
[[ " $curves" == *" ${logdir%/}"* ]] || echo "[tensorboard] no event files in $logdir yet: they are written every train.log_every" \
  "steps (train.tensorboard: true); there are curves in: ${curves:-no directory yet}"
echo "[tensorboard] from your own machine: ssh -L $port:localhost:$port $(id -un)@<this host>, then open http://localhost:$port"
exec .venv/bin/tensorboard --logdir "$logdir" --host 127.0.0.1 --port "$port"
