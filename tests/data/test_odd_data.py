"""Any data is read as valid tokens, or refused in plain text that names the file or key."""

import os
from pathlib import Path

from tests.data.odd_data import failures_of

CASES = int(os.environ.get("TAMIS_FUZZ_CASES", "30"))  # all of them: python -m tests.fuzz data


def test_odd_data_is_read_or_refused_by_name(tmp_path: Path) -> None:
    failures = [line for seed in range(CASES) for line in failures_of(seed, tmp_path)]
    assert failures == [], "\n".join(failures)
