"""One odd file never takes a reader of runs down: each answers, and names the file."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from tamis.run.files.directory import RunDirectory
from tests.run.odd_files import failures_of, mutations, prepared_run, reader_failures

CASES = int(os.environ.get("TAMIS_FUZZ_CASES", "36"))  # TAMIS_FUZZ_CASES=200 runs more
PARTS = 4


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return prepared_run(tmp_path_factory.mktemp("odd"))


@pytest.mark.parametrize("part", range(PARTS))
def test_every_reader_answers_and_names_an_odd_file(original, tmp_path, capsys, part):
    failures = [line for seed in range(part, CASES, PARTS) for line in failures_of(seed, original, tmp_path)]
    assert failures == [], "\n".join(failures)


@pytest.mark.parametrize("odd", ["folder", "deeply nested"])
def test_every_reader_answers_when_all_files_that_few_runs_have_are_odd(original, tmp_path, capsys, odd):
    run = RunDirectory(shutil.copytree(original, tmp_path / "out"))
    for path in (run.eval_json, run.samples, run.live_html, run.cost_json, run.copies, run.keep):
        mutations(random.Random(1))[odd](path)
    assert reader_failures(run, odd) == []


def test_half_a_character_in_a_record_stops_no_reader(original, tmp_path, capsys):
    run = RunDirectory(shutil.copytree(original, tmp_path / "out"))
    half = "\ud800"  # JSON and YAML can hold it, UTF-8 cannot
    with open(run.events, "a") as file:
        file.write(json.dumps({"ts": 1.0, "by": half, "event": half, "reason": half}) + "\n")
    run.run_info.write_text(run.run_info.read_text() + f"note: {json.dumps(half)}\n")
    assert reader_failures(run, "half a character") == []
