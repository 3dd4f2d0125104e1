#!/usr/bin/env bash
# Bootstraps if needed, then checks style and types and runs all tests.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/prime_bootstrap.sh --test
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
# One process more than two cores hold: many tests wait for trainers that they started.
exec .venv/bin/python -m pytest -n "${TEST_PROCESSES:-3}" --dist worksteal "$@"
