#!/usr/bin/env bash
# Starts `tamis run` with these words, or continues the run: from the checkpoints that are here, else, on a fresh
# machine, from its newest copy in COPY_TO. Its exit code and signals are those of `tamis run`.
set -euo pipefail
cd "$(dirname "$0")/.."
words=("$@")
if [ -n "${COPY_TO:-}" ]; then
  # A store that cannot be read ends the script here: a run must not start over because its copies are out of reach.
  found=$(.venv/bin/python - "$COPY_TO" <<'PY'
import sys
from tamis.run.copies.index import complete_copies
from tamis.run.copies.store import open_store
print("copy" if complete_copies(open_store(sys.argv[1])) else "nothing")
PY
)
  if [ "$found" = copy ]; then words+=(--from "$COPY_TO"); else words+=("copy.to=$COPY_TO"); fi
fi
exec .venv/bin/python -u -m tamis run "${words[@]}"
