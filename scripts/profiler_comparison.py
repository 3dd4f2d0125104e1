#!/usr/bin/env python3
"""The same training step with sparse kernels, the plain-PyTorch reference and dense attention.

python scripts/profiler_comparison.py --steps 100 --warmup 10   (see `tamis bench paths --help`)
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tamis.cli.main import main
from tamis.run.files.hardware import read_gpus
from tamis.run.plan import SHOWCASE_CONFIG

if __name__ == "__main__":
    # M7C where a GPU can carry it; on a processor a hundred steps of it would take an hour.
    os.environ.setdefault("CONFIG", "configs/m7c_125m_2xa100_production.yaml" if read_gpus() else SHOWCASE_CONFIG)
    sys.argv[1:1] = ["bench", "paths"]
    main()
