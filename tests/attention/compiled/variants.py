"""Compile the function `kernel` of each given file for an H100, unless it is recorded, and print keys and needs.

Run as a program in a process without TRITON_INTERPRET: `python -m tests.attention.compiled.variants RECORD 4 FILE...`,
where 4 is the number of warps.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import triton.compiler
from triton.backends.compiler import GPUTarget

from tests.attention.compiled.record import use_record


def main() -> None:
    record, warps, *files = sys.argv[1:]
    use_record(Path(record))
    kernels = []
    for file in files:
        function = runpy.run_path(file, run_name="variant")["kernel"]
        source = triton.compiler.ASTSource(function, {"x": "*fp32", "SIZE": "constexpr"}, {"SIZE": 128})
        kernel = triton.compiler.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": int(warps)})
        kernels.append((kernel.hash, kernel.needs))
    print(json.dumps(kernels))


if __name__ == "__main__":
    main()
