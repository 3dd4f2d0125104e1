#!/usr/bin/env bash
# Makes .venv and installs the pinned dependencies; run it as often as you like. `--test` adds what the tests need.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "[bootstrap] $*"; }
fail() { echo "[bootstrap] error: $*" >&2; exit 1; }

extras=""
case "${1:-}" in
  "") ;;
  --test) extras="[test]" ;;
  *) fail "unknown argument $1 (only --test is known)" ;;
esac

find_python() {
  for candidate in python3 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"; return
    fi
  done
  fail "no Python 3.11 or newer with venv found: install python3.11-venv or newer, then run this again"
}

# A CUDA torch that is already there and new enough saves a download of several gigabytes.
machine_torch() {
  "$1" - <<'PY' 2>/dev/null || true
import re, torch
if torch.version.cuda and tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) >= (2, 10):
    print(torch.__version__)
PY
}

site_of_torch() { "$1" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])'; }
site_packages() { .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

show_gpus() {
  if command -v nvidia-smi >/dev/null && gpus=$(nvidia-smi --query-gpu=index,name,memory.total --format=csv,noheader 2>/dev/null); then
    while IFS= read -r gpu; do say "GPU $gpu"; done <<<"$gpus"
  else
    say "no NVIDIA GPU found: the embedded showcase will run on the CPU"
  fi
}

say "Tamis in $PWD"
stamp=$(cat pyproject.toml constraints.txt scripts/prime_bootstrap.sh | sha256sum | cut -c1-16)
# What was installed with the test extras also serves without them.
if [ -x .venv/bin/tamis ] && grep -qxF -e "$stamp [test]" -e "$stamp $extras" .venv/.tamis-stamp 2>/dev/null; then
  say ".venv is up to date"
  show_gpus
  exit 0
fi

python=$(find_python)
say "using $("$python" --version) at $(command -v "$python")"
found=$(machine_torch "$python")
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
if [ -n "$found" ]; then
  say "reusing the machine's torch $found (pip may name conflicts among packages that Tamis does not use)"
  [ -x .venv/bin/python ] || "$python" -m venv --system-site-packages .venv
  # A torch that lives in an environment of its own is no system package: point at where it lies.
  .venv/bin/python -c 'import torch' 2>/dev/null || site_of_torch "$python" >"$(site_packages)/machine_torch.pth"
  grep -viE '^(torch|triton|numpy|setuptools)==' constraints.txt >"$constraints"
else
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  cp constraints.txt "$constraints"
  if command -v nvidia-smi >/dev/null; then
    {
      while IFS= read -r pin; do
        grep -qF "#gpu ${pin%%==*}==" constraints.txt || echo "$pin"
      done < <(grep -v '^#' constraints.txt)
      grep '^#gpu ' constraints.txt | cut -c6-
    } >"$constraints"
  fi
fi

say "installing pinned dependencies (a minute or two, more when torch must be downloaded)"
.venv/bin/python -m pip install -qq --disable-pip-version-check --constraint "$constraints" --editable ".$extras" \
  || fail "installing failed: read the lines above; check the network and the free disk space, then run this again"
.venv/bin/python -c 'import torch, tamis; print(f"[bootstrap] torch {torch.__version__}, tamis {tamis.__version__}")' \
  || fail "torch or tamis cannot be imported from .venv: remove .venv and run this again"
echo "$stamp $extras" >>.venv/.tamis-stamp
show_gpus
say "done: .venv/bin/tamis --help"
