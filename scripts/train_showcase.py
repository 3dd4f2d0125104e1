#!/usr/bin/env python3
"""The trainer, with the runbooks' flags and variables: `python scripts/train_showcase.py --help`."""

import signal
import sys
from pathlib import Path

signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # asked for stacks before it can give any, it must not die of it
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tamis.cli.main import train_showcase  # noqa: E402

if __name__ == "__main__":
    sys.exit(train_showcase(sys.argv[1:]))
