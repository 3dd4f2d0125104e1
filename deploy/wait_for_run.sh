# Sourced: starts deploy/start.sh with these words, passes TERM on to it, and leaves its exit code in `code`.
wait_for_run() {
  bash deploy/start.sh "$@" &
  local run=$!
  trap 'kill -TERM "$run" 2>/dev/null' TERM INT
  code=0
  wait "$run" || code=$?
  while kill -0 "$run" 2>/dev/null; do  # a signal interrupts wait; the run still saves its checkpoint
    code=0
    wait "$run" || code=$?
  done
}
