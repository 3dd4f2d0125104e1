"""torchrun, which listens on one address alone and ignores SIGUSR1. The bootstrap installs it as `.venv/bin/torchrun`.

`pgrep -f scripts/train_showcase.py` finds torchrun too, since the script is among its arguments. The workers answer
SIGUSR1 with their stacks; torchrun itself has no handler, and the signal would end it and the run.
"""

import signal
import sys

from _environment import enter_environment

signal.signal(signal.SIGUSR1, signal.SIG_IGN)
enter_environment()

from tamis.train.tools.torchrun import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
