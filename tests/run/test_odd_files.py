"""One odd file never takes a reader of runs down: each answers, and names the file."""

import os
from pathlib import Path

import pytest

from tests.run.odd_files import failures_of, prepared_run

CASES = int(os.environ.get("TAMIS_FUZZ_CASES", "36"))  # TAMIS_FUZZ_CASES=200 runs more
PARTS = 4


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return prepared_run(tmp_path_factory.mktemp("odd"))


@pytest.mark.parametrize("part", range(PARTS))
def test_every_reader_answers_and_names_an_odd_file(original, tmp_path, capsys, part):
    failures = [line for seed in range(part, CASES, PARTS) for line in failures_of(seed, original, tmp_path)]
    assert failures == [], "\n".join(failures)
