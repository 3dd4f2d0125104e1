"""Any configuration is accepted with finite sizes, or refused in plain text that names the key or file."""

import os
from pathlib import Path

from tests.config.odd_configs import failures_of

CASES = int(os.environ.get("TAMIS_FUZZ_CASES", "150"))  # all of them: python -m tests.fuzz config


def test_odd_configurations_are_accepted_or_refused_by_name(tmp_path: Path) -> None:
    failures = [line for seed in range(CASES) for line in failures_of(seed, tmp_path)]
    assert failures == [], "\n".join(failures)
