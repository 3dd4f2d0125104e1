"""CSV logs and small files survive kills, resumes and full disks."""

import errno
import os
import resource
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.run.files import records
from tamis.run.files.records import TRAINING_HEADER, CsvLog, write_atomic, write_json_atomic, write_text_atomic


def test_a_resumed_log_has_no_duplicate_and_no_missing_step(tmp_path: Path) -> None:
    log = CsvLog(tmp_path / "training.csv", TRAINING_HEADER)
    log.resume_at(0)
    for step in range(1, 8):
        log.append(step, 3.0 / step, 2e-7 * step, 1000.0)
    whole = log.path.read_text()
    log.resume_at(4)
    for step in range(5, 8):
        log.append(step, 3.0 / step, 2e-7 * step, 1000.0)
    assert log.path.read_text() == whole
    assert whole.splitlines()[0] == "step,loss,lr,toks_per_s"


@given(cut=st.integers(0, 200), step=st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_a_log_cut_anywhere_resumes_with_exactly_the_complete_rows(
    tmp_path_factory: pytest.TempPathFactory, cut: int, step: int
) -> None:
    log = CsvLog(tmp_path_factory.mktemp("log") / "training.csv", TRAINING_HEADER)
    log.resume_at(0)
    for number in range(1, 11):
        log.append(number, 3.5, 1e-4, 12345.6)
    content = log.path.read_bytes()
    log.path.write_bytes(content[:cut])
    complete = [int(line.split(b",")[0]) for line in content[:cut].split(b"\n")[1:-1]]
    log.resume_at(step)
    lines = log.path.read_text().splitlines()
    assert lines[0] == TRAINING_HEADER
    assert [int(line.split(",")[0]) for line in lines[1:]] == [number for number in complete if number <= step]


def test_a_row_with_the_wrong_number_of_columns_is_refused(tmp_path: Path) -> None:
    log = CsvLog(tmp_path / "training.csv", TRAINING_HEADER)
    with pytest.raises(ValueError, match="step,loss,lr,toks_per_s"):
        log.append(1, 2.0)


def test_small_and_large_numbers_keep_their_digits(tmp_path: Path) -> None:
    log = CsvLog(tmp_path / "training.csv", TRAINING_HEADER)
    log.resume_at(0)
    log.append(50000, 3.1415927, 2e-7, 1234567.9)
    assert log.path.read_text().splitlines()[1] == "50000,3.1415927,2e-07,1234567.9"
    assert log.row(50000) == [50000, 3.1415927, 2e-07, 1234567.9]
    log.path.write_text(f"{TRAINING_HEADER}\n7,odd,0,0\n")
    assert log.row(7) is None and log.row(8) is None


def test_rows_a_full_disk_refused_are_written_with_the_next(tmp_path: Path) -> None:
    log = CsvLog(tmp_path / "training.csv", TRAINING_HEADER)
    log.resume_at(0)
    log.append(1, 3.0, 1e-4, 10.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size + 5, before[1]))  # room for half a row
    try:
        log.append(2, 3.0, 1e-4, 10.0)
        log.append(3, 3.0, 1e-4, 10.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(log.path.read_text().splitlines()) == 2
    log.append(4, 3.0, 1e-4, 10.0)
    assert [line.split(",")[0] for line in log.path.read_text().splitlines()] == ["step", "1", "2", "3", "4"]


def test_a_failed_write_leaves_the_old_file_and_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    write_json_atomic(path, {"loss": 1})

    def fail_half_way(file) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        write_atomic(path, fail_half_way)
    assert path.read_text() == '{\n  "loss": 1\n}\n'
    assert os.listdir(tmp_path) == ["metrics.json"]


def test_text_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "note"
    write_text_atomic(path, "a long first text")
    write_text_atomic(path, "ünd")
    assert path.read_text(encoding="utf-8") == "ünd"


def test_a_link_with_the_scratch_files_name_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    (tmp_path / f"run.info.{os.getpid()}.tmp").symlink_to(precious)
    write_text_atomic(tmp_path / "run.info", "new")
    assert (precious.read_text(), (tmp_path / "run.info").read_text()) == ("keep me", "new")
    assert not (tmp_path / "run.info").is_symlink()


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC])
def test_a_write_that_fails_names_the_file_that_was_meant_and_a_remedy(tmp_path: Path, monkeypatch, code: int) -> None:
    def refused(path: Path) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(records, "open_new", refused)
    with pytest.raises(OSError) as failed:
        write_text_atomic(tmp_path / "judgement.json", "{}")
    assert failed.value.errno == code and ".tmp" not in str(failed.value)
    expected = f"{tmp_path / 'judgement.json'}: {os.strerror(code)}; {records.WRITE_REMEDIES[code]}"
    assert records.os_error_text(failed.value) == expected


def test_an_error_of_a_file_that_was_meant_to_be_read_has_no_remedy_for_writing(tmp_path: Path) -> None:
    with pytest.raises(OSError) as failed:
        (tmp_path / "nope.txt").read_text()
    assert records.os_error_text(failed.value) == f"{tmp_path / 'nope.txt'}: No such file or directory"
