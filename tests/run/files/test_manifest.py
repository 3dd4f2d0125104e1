"""Only whole checkpoints are trusted, and the newest whole one is found."""

import os
from pathlib import Path

import pytest

from tamis.run.files import manifest
from tamis.run.files.directory import RunDirectory
from tamis.run.files.manifest import (
    DamagedCheckpoint,
    checkpoint_to_resume,
    damage,
    latest_valid_checkpoint,
    remove_leftovers,
    require_valid,
    retire,
    write_manifest,
)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    for step in (10, 20, 30):
        save(run, step)
    return run


def save(run: RunDirectory, step: int) -> None:
    run.checkpoint(step).write_bytes(bytes([step]) * 1000)
    write_manifest(run, step, config_hash="abc")


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)


def test_an_untouched_checkpoint_is_valid(run: RunDirectory) -> None:
    assert damage(run.manifest(30)) is None and latest_valid_checkpoint(run) == 30
    require_valid(run.checkpoint(30))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda run: flip_a_bit(run.checkpoint(30)), "sha256"),
        (lambda run: run.checkpoint(30).write_bytes(b"short"), "5 bytes, 1000 were written"),
        (lambda run: run.manifest(30).unlink(), "cut short"),
        (lambda run: run.checkpoint(30).unlink(), "gone"),
        (lambda run: run.manifest(30).write_text('{"step": 30'), "cannot be read"),
        (lambda run: run.manifest(30).write_text("[]"), "cannot be read"),
    ],
)
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_is_used(run: RunDirectory, spoil, words) -> None:
    spoil(run)
    named: list[str] = []
    assert latest_valid_checkpoint(run, on_damaged=named.append) == 20
    assert len(named) == 1 and "checkpoint_step30.pt" in named[0] and words in named[0]
    assert words in str(damage(run.manifest(30)))


def test_an_explicit_damaged_file_is_refused_with_the_one_to_use(run: RunDirectory) -> None:
    flip_a_bit(run.checkpoint(30))
    with pytest.raises(DamagedCheckpoint, match=r"checkpoint_step30\.pt.*sha256.*checkpoint_step20\.pt"):
        require_valid(run.checkpoint(30))
    with pytest.raises(DamagedCheckpoint, match="no such file"):
        require_valid(run.checkpoint(77))


def test_a_run_whose_checkpoints_are_all_damaged_never_starts_over_by_itself(run: RunDirectory) -> None:
    for step in (10, 20, 30):
        run.manifest(step).unlink()
    with pytest.raises(DamagedCheckpoint, match=r"step30\.pt.*step20\.pt.*step10\.pt.*To start over on purpose"):
        checkpoint_to_resume(run)
    for step in (10, 20):
        run.checkpoint(step).unlink()
    named: list[str] = []
    assert checkpoint_to_resume(run, on_damaged=named.append) is None, "a kill in the first save leaves this"
    assert len(named) == 1 and "cut short" in named[0]
    run.manifest(30).write_text("{}")
    with pytest.raises(DamagedCheckpoint, match="cannot be read"):
        checkpoint_to_resume(run)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_checkpoint_is_summed_once_per_process_while_it_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    run, summed = RunDirectory(tmp_path), []
    content = run.checkpoint(5) if kind == "file" else run.checkpoint(5) / "part"
    content.parent.mkdir(exist_ok=True)
    content.write_bytes(b"whole")
    write_manifest(run, 5, config_hash="abc")
    compute = manifest.sha256_of
    monkeypatch.setattr(manifest, "sha256_of", lambda path: summed.append(path) or compute(path))
    for _ in range(2):
        assert checkpoint_to_resume(run) == 5
    assert len(summed) >= 2  # changed just now: its times could hide another change
    monkeypatch.setattr(manifest, "SETTLED_S", -1.0)
    summed.clear()
    for _ in range(2):
        assert checkpoint_to_resume(run) == 5
        require_valid(run.checkpoint(5))
    assert summed.count(run.checkpoint(5)) == 1
    content.write_bytes(b"wrong")
    os.utime(content, ns=(1, 1))  # even if the times are set back, that itself is a change
    assert "sha256" in str(damage(run.manifest(5)))


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert latest_valid_checkpoint(tmp_path / "nowhere") is None


def test_retention_keeps_the_newest_and_zero_keeps_all(run: RunDirectory) -> None:
    assert retire(run, keep=0) == []
    assert retire(run, keep=2) == [10]
    assert run.checkpoints() == [20, 30] and not run.checkpoint(10).exists()


def test_retention_never_counts_a_cut_short_checkpoint_as_kept(run: RunDirectory) -> None:
    run.checkpoint(40).write_bytes(b"no manifest")
    run.checkpoint(30).write_bytes(b"truncated")
    assert retire(run, keep=2) == []
    assert damage(run.manifest(10)) is None and damage(run.manifest(20)) is None


def test_temporary_files_of_killed_saves_are_removed(run: RunDirectory) -> None:
    temporary = run.path / "checkpoint_step40.pt.4711.tmp"
    temporary.write_bytes(b"half")
    remove_leftovers(run)
    assert not temporary.exists() and run.checkpoints() == [10, 20, 30]
