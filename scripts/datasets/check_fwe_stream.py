"""Fetch a few batches of FineWeb-Edu through the real loader and tokenizer; exit 0 only when they arrive.

CONFIG may name a config file; otherwise the built-in defaults are used. See `tamis data check --help` for more.
Example: PYTHONPATH=. python scripts/datasets/check_fwe_stream.py
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _environment import enter_environment

enter_environment()

from tamis.cli.main import guarded
from tamis.cli.models import check_data
from tamis.config import load_config

QUICK = ["data.dataset=fineweb_edu", "data.loader_timeout_s=60.0", "train.batch_size=4", "train.eval_batches=1"]


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    return check_data(load_config(os.environ.get("CONFIG") or None, QUICK), batches=4)


if __name__ == "__main__":
    sys.exit(guarded(main, debug=False))
