# shellcheck shell=bash
# Sourced: starts deploy/start.sh with these words, passes TERM on to it, and returns its exit code.
wait_for_run() {
  local run code=0
  bash deploy/start.sh "$@" &
  run=$!
  trap 'kill -TERM "$run" 2>/dev/null' TERM INT
  wait "$run" || code=$?
  while kill -0 "$run" 2>/dev/null; do  # a signal interrupts wait; the run still saves its checkpoint
    code=0
    wait "$run" || code=$?
  done
  return "$code"
}
