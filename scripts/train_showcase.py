#!/usr/bin/env python3
"""The trainer, with the runbooks' flags and variables: `python scripts/train_showcase.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tamis.cli import train_showcase

if __name__ == "__main__":
    sys.exit(train_showcase(sys.argv[1:]))
