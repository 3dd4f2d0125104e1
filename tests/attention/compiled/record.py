"""What compiled kernels need, from a file: the tests compile only what changed since it was written.

`python -m tests.attention.compiled.record` renews record.json: it runs the tests that compile, adds what they had to
compile and removes what none of them used. A kernel that is not recorded is compiled, which only takes longer.

The key of an entry is made of Triton's own key for a binary. That covers the source of the kernel and of all that it
calls, its signature, constants and options, the GPU, Triton's files and the version of ptxas. Line numbers are left
out, because an edit above a kernel does not change it. Every run compiles one recorded kernel of each folder and
compares it with its entry.
"""

from __future__ import annotations

import atexit
import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton.compiler
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.runtime.jit import JITCallable

RECORD = Path(__file__).with_suffix(".json")
RENEW = "python -m tests.attention.compiled.record"
FOLDER = "COMPILED_KERNELS"  # where each process of a renewal leaves the entries that it used
TESTS = ("tests/attention/compiled/test_compile.py", "tests/model/test_compile.py")
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

Needs = dict[str, int]
Entries = dict[str, dict[str, Needs]]  # a kernel's module and name → key → what it needs


@dataclass(frozen=True)
class Measured:
    """What a launch gets instead of a compiled kernel."""

    hash: str
    needs: Needs


def split_reductions(ttgir: str) -> int:
    """How many reductions run over lanes that are no neighbours: Triton 3.6 leaves some of those lanes out."""
    lanes = {
        name: [json.loads(f"[{basis}]") for basis in re.findall(r"\[([\d, ]+)\]", bases)]
        for name, bases in re.findall(r"^(#\w+) = #ttg\.linear<.*?lane = \[(.*?)\], warp", ttgir, re.MULTILINE)
    }
    split = 0
    for axis, layout in re.findall(
        r'"tt\.reduce".*?axis = (\d+).*?^\s*\}\) : \(tensor<[^,]+, (#\w+)', ttgir, re.M | re.S
    ):
        bits = [i for i, basis in enumerate(lanes.get(layout, [])) if basis[int(axis)]]
        split += bool(bits) and bits[-1] - bits[0] >= len(bits)
    return split


def measure(kernel: Any) -> Needs:
    """Registers, stack (spills) and shared memory in bytes, and which instructions the code has how often."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()  # type: ignore[union-attr]
    ptx = kernel.asm["ptx"]
    return {
        "registers": int(registers),
        "stack": int(stack),
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "launches_early": int(kernel.metadata.launch_pdl),
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": len(re.findall(r"\bmma\.sync", ptx)),
        "narrow_loads": len(re.findall(r"ld\.global\.[bu](?:16|32)\s", ptx)),  # a thread could load 16 bytes
        "split_reductions": split_reductions(kernel.asm["ttgir"]),
    }


def key_of(src: Any, target: Any, options: dict[str, Any]) -> str:
    """Name a binary and the way it is measured."""
    backend = triton.compiler.make_backend(target)
    anywhere = property(lambda function: 1, lambda function, line: None)
    with patch.object(JITCallable, "starting_line_number", anywhere, create=True):
        environment = get_cache_invalidating_env_vars()
        key = triton.compiler.get_cache_key(src, backend, backend.parse_options(options), environment)
    how = inspect.getsource(measure) + inspect.getsource(split_reductions)
    return hashlib.sha256(f"{key} {how}".encode()).hexdigest()[:16]


def use_record(path: Path = RECORD) -> None:
    """From now on launches in this process compile what is not recorded, and get `Measured` kernels."""
    recorded, used, compile_kernel = read_record(path), Entries(), triton.compiler.compile
    keys: dict[str, list[str]] = {}
    for name, entries in recorded.items():
        keys.setdefault(name.rsplit(".", 2)[0], []).extend(entries)
    compared = {min(found) for found in keys.values()}

    def look_up(src: Any, target: Any, options: dict[str, Any], **_: Any) -> Measured:
        name, key = f"{src.fn.__module__}.{src.name}", key_of(src, target, options)
        needs = recorded.get(name, {}).get(key)
        if needs is None or key in compared:
            compiled = measure(compile_kernel(src, target=target, options=options))
            if needs not in (None, compiled):
                raise RuntimeError(f"{path}: {name} {key} is {needs}, compiled {compiled}. Delete it, then {RENEW}")
            needs = compiled
        used.setdefault(name, {})[key] = needs
        return Measured(key, needs)

    triton.compiler.compile = look_up
    atexit.register(_leave_entries, path, recorded, used)


def _leave_entries(path: Path, recorded: Entries, used: Entries) -> None:
    missing = sum(key not in recorded.get(name, {}) for name, entries in used.items() for key in entries)
    if missing:
        print(f"{path.name} does not hold {missing} compiled kernels. To renew it: {RENEW}", file=sys.stderr)
    if folder := os.environ.get(FOLDER):
        write_record(Path(folder, f"{os.getpid()}.json"), used)


def read_record(path: Path) -> Entries:
    if not path.exists():
        return {}
    fields, kernels = json.loads(path.read_text()).values()
    return {name: {k: dict(zip(fields, n, strict=True)) for k, n in found.items()} for name, found in kernels.items()}


def write_record(path: Path, entries: Entries) -> None:
    """Write one line for each entry, so that the changes of two branches merge."""
    fields = next((list(n) for found in entries.values() for n in found.values()), [])
    kernels = (
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f'"{key}": {json.dumps(list(needs.values()))}' for key, needs in sorted(found.items()))
        + "\n}"
        for name, found in sorted(entries.items())
    )
    path.write_text(f'{{"fields": {json.dumps(fields)},\n"kernels": {{\n' + ",\n".join(kernels) + "\n}}\n")


def main() -> int:
    """Renew the record."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *TESTS]
        if code := subprocess.run(command, env=os.environ | {FOLDER: folder}).returncode:
            return code
        entries: Entries = {}
        for path in Path(folder).iterdir():
            for name, found in read_record(path).items():
                entries.setdefault(name, {}).update(found)
    write_record(RECORD, entries)
    print(f"{RECORD.name} holds {sum(map(len, entries.values()))} kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
