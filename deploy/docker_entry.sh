#!/usr/bin/env bash
# Entry of the container: `deploy/start.sh` with these words. Docker's `restart: on-failure` restarts after any code but
# 0, so a code that a restart cannot help becomes 0 here; OUT/events.jsonl keeps the true one.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. deploy/wait_for_run.sh
code=0
wait_for_run "$@" || code=$?
case "$code" in
  1 | 2 | 3 | 5 | 6 | 7)
    echo "tamis ended with code $code, and a restart would not help: read docs/deploy.md. The container ends" >&2
    exit 0
    ;;
esac
exit "$code"  # 0 done; 4 stopped by a signal; 128 and more: killed
