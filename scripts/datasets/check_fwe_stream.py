"""Fetch a few batches of FineWeb-Edu through the real loader and tokenizer; exit 0 only when they came.

CONFIG may name a config file; otherwise the built-in defaults are used. See `tamis data check --help` for more.
"""

import os
import sys

from tamis.config import ConfigError, load_config
from tamis.data.check import check

QUICK = ["data.dataset=fineweb_edu", "data.loader_timeout_s=60.0", "train.batch_size=4", "train.eval_batches=1"]

if __name__ == "__main__":
    try:
        config = load_config(os.environ.get("CONFIG"), QUICK)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    sys.exit(check(config))
