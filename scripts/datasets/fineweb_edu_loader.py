"""Run the loader alone, with the config of a run: time to the first batch, token ids, lengths, throughput.

Example: python scripts/datasets/fineweb_edu_loader.py --config configs/m7c_125m_80g.yaml --batches 20
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _environment import enter_environment

enter_environment()

from tamis.cli.main import guarded
from tamis.cli.models import check_data
from tamis.config import load_config


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file of the run")
    parser.add_argument("--batches", type=int, default=10, metavar="N", help="number of batches to fetch")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the config")
    arguments = parser.parse_args()
    if arguments.batches < 1:
        parser.error(f"--batches must be at least 1, got {arguments.batches}")
    return check_data(load_config(arguments.config, arguments.overrides), arguments.batches, show_text=False)


if __name__ == "__main__":
    sys.exit(guarded(main, debug=False))
