#!/usr/bin/env python3
"""The trainer, with the runbooks' flags and variables: `python scripts/train_showcase.py --help`."""

import signal
import sys

from _environment import enter_environment

signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until the trainer has its handler, the signal must not end the process
enter_environment()

from tamis.cli.main import train_showcase

if __name__ == "__main__":
    sys.exit(train_showcase(sys.argv[1:]))
