#!/usr/bin/env bash
# Bootstraps if needed, checks style and types, and runs all tests. Those that reach another machine over SSH start an
# sshd on loopback; without sshd, ssh and rsync (Debian: openssh-server, openssh-client, rsync) they are skipped,
# and so are those that open pages in a browser where there is no chromium.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONDONTWRITEBYTECODE=  # tests start hundreds of processes, and none should compile what another has compiled
bash scripts/prime_bootstrap.sh --test --from-script
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy & types=$!  # while the tests are compiled and run, which does not keep two cores busy
# The first time, one process compiles what the tests import, before five would do so at once.
[ -d tests/__pycache__ ] || .venv/bin/python -m pytest -qq --collect-only "$@" >/dev/null || true  # the next line reports
# More than twice as many processes as two cores: many tests wait for trainers that they started. A file stays in one process,
# which shares the file's fixtures, and the order of tests/conftest.py is kept: the longest files start first.
.venv/bin/python -m pytest -n "${TEST_PROCESSES:-5}" --dist loadscope --no-loadscope-reorder "$@"
wait "$types"
