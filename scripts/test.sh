#!/usr/bin/env bash
# Bootstraps if needed, then checks style and types and runs all tests.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/prime_bootstrap.sh --test
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
exec .venv/bin/python -m pytest -n "${TEST_PROCESSES:-2}" --dist worksteal "$@"
