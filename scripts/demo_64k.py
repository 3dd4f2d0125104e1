#!/usr/bin/env python
"""Read a long prompt by tiles through the caches, then decode tokens; the dense twin does the same for comparison.

Example: PYTHONPATH=. python scripts/demo_64k.py --S 65536 --prefill_tile 4096 --rope_scale 8.0 --use_fa2 1
"""

from __future__ import annotations

import argparse
import sys

from _environment import enter_environment

enter_environment()

from tamis.cli.main import guarded
from tamis.run.files.console import announced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--S", type=int, default=65536, help="tokens of the prompt")
    parser.add_argument("--prefill_tile", type=int, default=4096, help="tokens per tile")
    parser.add_argument("--rope_scale", type=float, default=1.0, help="positions are divided by this, in every branch")
    parser.add_argument("--use_fa2", type=int, choices=(0, 1), default=1, help="dense twin: allow flash attention")
    parser.add_argument("--decode_tokens", type=int, default=32, help="tokens decoded after the prompt")
    parser.add_argument("--checkpoint", help="checkpoint, run directory or exported folder; without it, fresh weights")
    parser.add_argument("--config", help="YAML of the model to initialise; without it, M7C")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="auto: a GPU if there is one")
    parser.add_argument("--precision", choices=("bf16", "fp16", "fp32"), help="by default bf16 on a GPU, else fp32")
    parser.add_argument("--seed", type=int, default=1337, help="of weights and prompt")
    parser.add_argument("overrides", nargs="*", help="section.key=value for the model to initialise")
    arguments = vars(parser.parse_args())
    arguments["use_fa2"] = bool(arguments["use_fa2"])
    with announced(f"reading {arguments['S']:,} tokens by tiles, then decoding"):
        from tamis.generate.demo import demo_64k  # after the arguments, so that --help does not wait for torch

        demo_64k(**arguments)


if __name__ == "__main__":
    sys.exit(guarded(main, debug=False))
