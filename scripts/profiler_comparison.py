#!/usr/bin/env python3
"""Compare the training step with sparse kernels, with the plain-PyTorch reference and with dense attention.

python scripts/profiler_comparison.py --steps 100 --warmup 10   (see `tamis bench paths --help`)
"""

import os
import sys

from _environment import enter_environment

enter_environment()

from tamis.cli.main import main
from tamis.run.files.hardware import read_gpus
from tamis.run.plan import SHOWCASE_CONFIG

if __name__ == "__main__":
    # M7C where there is a GPU; on a CPU a hundred steps of it would take an hour.
    os.environ.setdefault("CONFIG", "configs/m7c_125m_2xa100_production.yaml" if read_gpus() else SHOWCASE_CONFIG)
    sys.argv[1:1] = ["bench", "paths"]
    main()
