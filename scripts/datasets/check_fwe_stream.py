"""Fetch a few batches of FineWeb-Edu through the real loader and tokenizer; exit 0 only when they came.

CONFIG may name a config file; otherwise the built-in defaults are used. See `tamis data check --help` for more.
Example: PYTHONPATH=. python scripts/datasets/check_fwe_stream.py
"""

import argparse
import os
import sys

from tamis.cli import guarded
from tamis.cli_waiting import announced
from tamis.config import load_config
from tamis.data.check import check

QUICK = ["data.dataset=fineweb_edu", "data.loader_timeout_s=60.0", "train.batch_size=4", "train.eval_batches=1"]


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    config = load_config(os.environ.get("CONFIG") or None, QUICK)
    with announced(f"reading {config.data.hub_name}, waiting {config.data.loader_timeout_s:g} s at most for a batch"):
        return check(config)


if __name__ == "__main__":
    sys.exit(guarded(main, debug=False))
