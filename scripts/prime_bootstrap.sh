#!/usr/bin/env bash
# Makes .venv and installs the pinned dependencies; it may run any number of times. `--test` adds what the tests need.
# `--own-torch` installs the torch and triton that the kernels were measured with, whatever the machine has.
# `--from-script` leaves out what to do next: the script that calls this one does it.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "[bootstrap] $*"; }
fail() { echo "[bootstrap] error: $*" >&2; exit 1; }

extras="[all]" next="bash scripts/train_m7c_prime.sh (to type tamis, torchrun or tensorboard, first: . .venv/bin/activate)"
own_torch=""
for word in "$@"; do
  case "$word" in
    --test) extras="[test]" ;;
    --own-torch) own_torch=yes ;;
    --from-script) next="" ;;
    *) fail "unknown argument $word (--test and --own-torch are known)" ;;
  esac
done

find_python() {
  for candidate in python3 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"; return
    fi
  done
  fail "no Python 3.11 or newer with venv found: install python3.11-venv or newer, then run this again"
}

ask_gpus() { nvidia-smi "--query-gpu=$1" --format=csv,noheader 2>/dev/null; }

# The PyTorch builds that this machine's driver can run: CUDA 13 needs driver 580, CUDA 12 needs 525.
choose_build() {
  driver=$(ask_gpus driver_version) || driver=""
  driver=${driver%%$'\n'*}
  local major=${driver%%.*}
  [[ "$major" =~ ^[0-9]+$ ]] || return 0  # no GPU answers: the pins decide
  if [ "$major" -ge 580 ]; then
    build=cu130
  elif [ "$major" -ge 525 ]; then
    build=cu126
  else
    fail "NVIDIA driver $driver is too old for PyTorch: install driver 525.60.13 or newer (580.65.06 or newer for CUDA 13)"
  fi
}

# A CUDA torch that is already there, new enough and able to use the GPUs, if any, saves a download of several gigabytes.
# Prints its version and that of triton.
machine_torch() {
  "$1" - ${build:+"$build"} <<'PY' 2>/dev/null || true
import re, sys, torch
try:
    from triton import __version__ as triton
except ImportError:
    triton = "the newest"  # which pip installs
new_enough = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) >= (2, 10)
if new_enough and torch.version.cuda and (torch.cuda.is_available() or not sys.argv[1:]):
    print(torch.__version__, triton)
PY
}

site_of_torch() { "$1" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])'; }
site_packages() { .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

show_gpus() {
  if command -v nvidia-smi >/dev/null && gpus=$(ask_gpus index,name,memory.total); then
    while IFS= read -r gpu; do say "GPU $gpu"; done <<<"$gpus"
  else
    say "no NVIDIA GPU found: the embedded showcase will run on the CPU"
  fi
  [ -z "$next" ] || say "next: $next"
}

say "Tamis in $PWD"
build="" driver=""
command -v nvidia-smi >/dev/null && choose_build
stamp=$(cat pyproject.toml constraints.txt scripts/prime_bootstrap.sh | sha256sum | cut -c1-16)
# An environment with the test extras also holds all others.
if [ -z "$own_torch" ] && [ -x .venv/bin/tamis ] && grep -qxF -e "$stamp [test]" -e "$stamp $extras" .venv/.tamis-stamp 2>/dev/null; then
  say ".venv is up to date"
  show_gpus
  exit 0
fi

python=$(find_python)
say "using $("$python" --version) at $(command -v "$python")"
found="" triton="" measured=$(grep '^#gpu triton==' constraints.txt | cut -d= -f3)
[ -n "$own_torch" ] || read -r found triton < <(machine_torch "$python") || true
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
index=()
if [ -n "$found" ]; then
  say "reusing the machine's torch $found (pip may name conflicts among packages that Tamis does not use)"
  [ "$triton" = "$measured" ] || say "the kernels were measured with triton $measured, not $triton, and may be slower here:" \
    "bash scripts/prime_bootstrap.sh --own-torch installs that one and its torch (several gigabytes)"
  [ -x .venv/bin/python ] || "$python" -m venv --system-site-packages .venv
  # A torch that lives in an environment of its own is no system package: add its folder to the path.
  .venv/bin/python -c 'import torch' 2>/dev/null || site_of_torch "$python" >"$(site_packages)/machine_torch.pth"
  grep -viE '^(torch|triton|numpy|setuptools)==' constraints.txt >"$constraints"
else
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  [ -z "$own_torch" ] || rm -f "$(site_packages)/machine_torch.pth"  # of an earlier call that reused a torch
  cp constraints.txt "$constraints"
  if command -v nvidia-smi >/dev/null; then
    {
      while IFS= read -r pin; do
        grep -qF "#gpu ${pin%%==*}==" constraints.txt || echo "$pin"
      done < <(grep -v '^#' constraints.txt)
      grep '^#gpu ' constraints.txt | cut -c6-
    } >"$constraints"
  fi
  if [ "$build" = cu126 ]; then
    say "driver $driver is older than CUDA 13 needs (580.65.06): installing PyTorch's build for CUDA 12.6"
    index=(--extra-index-url https://download.pytorch.org/whl/cu126)
    pinned=$(while IFS= read -r pin; do case "$pin" in torch==*) echo "$pin+cu126" ;; *) echo "$pin" ;; esac; done <"$constraints")
    echo "$pinned" >"$constraints"
  fi
fi

say "installing pinned dependencies (a minute or two, more when torch must be downloaded)"
# Python 3.11's own pip takes twice as long to choose the files.
.venv/bin/python -m pip install -qq --no-compile --disable-pip-version-check --constraint "$constraints" --upgrade pip 2>/dev/null || true
# pip compiles bytecode on one core; compileall, which follows, on all of them. Tests compile what they import.
.venv/bin/python -m pip install -qq --no-compile --disable-pip-version-check "${index[@]}" --constraint "$constraints" --editable ".$extras" \
  || fail "installing failed: read the lines above; check the network and the free disk space, then run this again"
[ "$extras" = "[test]" ] || .venv/bin/python -m compileall -qq -j 0 .venv/lib >/dev/null || true  # some are for other Pythons
.venv/bin/python -c 'import torch, tamis; print(f"[bootstrap] torch {torch.__version__}, tamis {tamis.__version__}")' \
  || fail "torch or tamis cannot be imported from .venv: remove .venv and run this again"
[ -z "$build" ] || .venv/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
  || fail "the installed torch cannot use the GPUs with driver $driver: update the driver to 580.65.06 or newer, remove .venv and run this again"
printf '#!/bin/sh\nexec "%s" "%s" "$@"\n' "$PWD/.venv/bin/python" "$PWD/scripts/_torchrun.py" >.venv/bin/torchrun
chmod +x .venv/bin/torchrun
echo "$stamp $extras" >>.venv/.tamis-stamp
show_gpus
