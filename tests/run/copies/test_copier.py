"""What is copied, in which order, what stays there, who may write there, and what is brought back."""

import json
import shutil
from pathlib import Path

import pytest

from tamis.config import ConfigError, load_config
from tamis.run.copies.copier import Copier, CopyRefused, SourceGone
from tamis.run.copies.fetch import fetch_newest
from tamis.run.copies.folder_store import FolderStore
from tamis.run.copies.index import parse_copy
from tamis.run.copies.store import StoreError, Transfer, TransferCancelled, open_store
from tamis.run.files.directory import RunDirectory
from tamis.run.files.identity import OtherRun
from tamis.run.files.manifest import damage, latest_valid_checkpoint
from tests.run.copies.saved_run import save, save_folder, saved_run
from tests.run.directory_bytes import directory_bytes


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "there"


def copier(run: RunDirectory, there: Path, keep: int = 3, transfer: Transfer | None = None) -> Copier:
    made = Copier(run, FolderStore(there), keep, transfer or Transfer())
    made.claim()
    return made


def copy_all(made: Copier) -> list[int]:
    """Copy what is missing, in the order of the copier; returns the steps."""
    steps = []
    while pending := made.pending():
        steps.append(pending[0])
        made.copy_step(pending[0])
        made.retire()
    made.copy_records()
    return steps


def bring_back(there: Path, out: Path) -> RunDirectory:
    fetch_newest(f"file://{there}", None, [f"train.out_dir={out}"])
    return RunDirectory(out)


def test_the_newest_checkpoint_goes_first_and_only_as_many_as_are_kept(tmp_path: Path, there: Path) -> None:
    run = saved_run(tmp_path / "out", 5, 10, 15)
    made = copier(run, there, keep=2)
    assert copy_all(made) == [15, 10] and made.newest() == 15
    save(run, 20)
    assert copy_all(made) == [20] and sorted(made.copies) == [15, 20]
    assert {path.name for path in there.glob("step*")} == {"step15", "step20"}
    assert (there / "training.csv").read_bytes() == run.training_csv.read_bytes()
    assert (there / "step20" / "training.csv").read_bytes() == run.training_csv.read_bytes()
    assert copy_all(copier(run, there, keep=2)) == []  # a later process sends nothing again
    assert not (run.path / ".copying").exists()


def test_a_copy_comes_back_as_it_was(tmp_path: Path, there: Path) -> None:
    run = saved_run(tmp_path / "out", 5)
    save_folder(run, 10)
    copy_all(copier(run, there))
    back = bring_back(there, tmp_path / "fresh")
    assert back.checkpoints() == [10] and damage(back.manifest(10)) is None
    for name in ("training.csv", "val.csv", "config.yaml", "events.jsonl"):
        assert (back.path / name).read_bytes() == (run.path / name).read_bytes()
    assert directory_bytes(back.checkpoint(10)) == directory_bytes(run.checkpoint(10))


def test_a_run_goes_to_another_machine_and_comes_back(tmp_path: Path, ssh_on_path) -> None:
    run = saved_run(tmp_path / "out", 5)
    url = f"gpubox:{tmp_path}/its place"
    made = Copier(run, open_store(url), 3, Transfer())
    made.claim()
    made.copy_step(5)
    made.retire()
    fetch_newest(url, None, [f"train.out_dir={tmp_path}/fresh"])
    back = RunDirectory(tmp_path / "fresh")
    assert back.checkpoints() == [5] and damage(back.manifest(5)) is None
    with pytest.raises(CopyRefused):
        made.require_own()


def test_an_upload_without_its_end_or_with_other_bytes_is_never_used(tmp_path: Path, there: Path, capsys) -> None:
    run = saved_run(tmp_path / "out", 5, 10, 15, 20)
    copy_all(copier(run, there, keep=4))
    (there / "step20" / "copy.json").unlink()  # cut before its end
    damaged = there / "step15" / "checkpoint_step15.pt"
    damaged.write_bytes(b"\0" + damaged.read_bytes()[1:])
    (there / "step10" / "checkpoint_step10.pt").unlink()
    back = bring_back(there, tmp_path / "fresh")
    assert back.checkpoints() == [5] and latest_valid_checkpoint(back) == 5
    printed = capsys.readouterr().out
    assert "step 15 is not used: the sha256 of checkpoint_step15.pt is not the one that was sent" in printed
    assert "step 10 is not used: checkpoint_step10.pt is missing" in printed
    for step in (5, 15):
        (there / f"step{step}" / f"checkpoint_step{step}.pt").unlink()
    with pytest.raises(ConfigError, match="is damaged: restore one there"):
        bring_back(there, tmp_path / "other")
    assert RunDirectory(tmp_path / "other").checkpoint_traces() == []
    with pytest.raises(ConfigError, match="holds no complete copy"):
        bring_back(tmp_path / "nothing", tmp_path / "other")


def test_bytes_that_arrive_damaged_are_noticed_and_sent_again(tmp_path: Path, there: Path) -> None:
    run = saved_run(tmp_path / "out", 5)
    made = copier(run, there)
    (there / "step5").mkdir()
    (there / "step5" / "checkpoint_step5.pt.part").write_bytes(b"of another upload")
    with pytest.raises(StoreError, match=r"checkpoint_step5\.pt arrived damaged"):
        made.copy_step(5)
    assert made.pending() == [5] and not (there / "step5" / "copy.json").exists()
    assert copy_all(made) == [5]


def test_a_checkpoint_that_retention_deletes_is_still_copied(tmp_path: Path, there: Path) -> None:
    run = saved_run(tmp_path / "out", 5, 10)

    class DeleteMeanwhile(Transfer):
        def spend(self, count: int) -> None:
            for path in (run.manifest(5), run.checkpoint(5)):
                path.unlink(missing_ok=True)

    made = copier(run, there, transfer=DeleteMeanwhile())
    made.copy_step(5)
    with pytest.raises(SourceGone, match="was deleted"):
        made.copy_step(5)
    assert bring_back(there, tmp_path / "fresh").checkpoints() == [5]


def test_a_checkpoint_that_is_damaged_here_is_not_copied(tmp_path: Path, there: Path) -> None:
    run = saved_run(tmp_path / "out", 5, 10)
    run.checkpoint(10).write_bytes(b"damaged")
    made = copier(run, there)
    with pytest.raises(SourceGone, match="damaged here"):
        made.copy_step(10)
    assert copy_all(made) == [5]


def test_two_machines_never_share_a_place(tmp_path: Path, there: Path) -> None:
    first, second = saved_run(tmp_path / "first", 5), saved_run(tmp_path / "second", 10)
    of_first = copier(first, there)
    copy_all(of_first)
    before = directory_bytes(there)
    with pytest.raises(CopyRefused, match=r"name another copy\.to.*tamis run --from"):
        copier(second, there)
    assert directory_bytes(there) == before
    fresh = bring_back(there, tmp_path / "fresh")  # takes the place over
    save(first, 15)
    with pytest.raises(CopyRefused):
        of_first.copy_step(15)
    assert not (there / "step15").exists()
    save(fresh, 15)
    assert copy_all(copier(fresh, there)) == [15]


def test_after_going_back_to_an_earlier_step_its_copies_are_the_newest(tmp_path: Path, there: Path) -> None:
    run = saved_run(tmp_path / "out", 5, 10, 15)
    copy_all(copier(run, there))
    for step in (10, 15):
        run.manifest(step).unlink()
        run.checkpoint(step).unlink()
    made = copier(run, there)
    assert copy_all(made) == [5] and made.newest() == 5 and sorted(made.copies) == [5, 10, 15]
    save(run, 10, "differently")
    assert copy_all(made) == [10] and made.newest() == 10
    back = bring_back(there, tmp_path / "fresh")
    assert b"differently" in back.checkpoint(10).read_bytes()[:99] and back.checkpoints() == [10]


def test_a_run_that_is_further_is_kept_and_another_run_is_refused(tmp_path: Path, there: Path, capsys) -> None:
    run = saved_run(tmp_path / "out", 5)
    copy_all(copier(run, there))
    save(run, 10)
    run.launch_lock.touch()
    before = directory_bytes(run.path)
    bring_back(there, run.path)
    assert directory_bytes(run.path) == before and "not fetched" in capsys.readouterr().out
    other = saved_run(tmp_path / "other", 5)
    tree = load_config(other.config_yaml, ["train.seed=7"])
    other.config_yaml.write_text(tree.to_yaml())
    before = directory_bytes(other.path)
    with pytest.raises(OtherRun, match=r"train\.seed"):
        bring_back(there, other.path)
    assert directory_bytes(other.path) == before


def test_a_fetch_that_was_cut_is_continued(tmp_path: Path, there: Path, monkeypatch) -> None:
    copy_all(copier(saved_run(tmp_path / "out", 5), there))
    fetched: list[str] = []
    copyfile = shutil.copyfile

    def cut_at_the_fourth_file(source: Path, target: Path) -> None:
        fetched.append(source.name)
        if len(fetched) == 4:
            raise OSError("the connection was cut")
        copyfile(source, target)

    monkeypatch.setattr(shutil, "copyfile", cut_at_the_fourth_file)
    with pytest.raises(StoreError, match="cut"):
        bring_back(there, tmp_path / "fresh")
    assert RunDirectory(tmp_path / "fresh").checkpoint_traces() == []
    assert bring_back(there, tmp_path / "fresh").checkpoints() == [5]
    assert fetched.count("checkpoint_step5.pt") == 1


@pytest.mark.parametrize(
    "change",
    [
        {"step": 6},
        {"generation": "1"},
        {"files": {}},
        {"extra": "../../etc/passwd"},
        {"extra": "/etc/passwd"},
        {"extra": "checkpoint_step5.pt/../../x"},
        {"extra": "checkpoint_step5.pt/.."},
        {"extra": ".lock"},
    ],
    ids=str,
)
def test_an_index_that_names_other_files_is_not_trusted(change: dict) -> None:
    entry = {"bytes": 1, "sha256": "0" * 64}
    files = dict.fromkeys(("checkpoint_step5.pt", "checkpoint_step5.json", "config.yaml"), entry)
    index = {"step": 5, "generation": 1, "checkpoint": "0" * 64, "files": files}
    assert parse_copy(json.dumps(index).encode(), 5) is not None
    if "extra" in change:
        change = {"files": files | {change["extra"]: entry}}
    assert parse_copy(json.dumps(index | change).encode(), 5) is None


def test_an_upload_that_is_not_urgent_ends_when_it_must(tmp_path: Path, there: Path) -> None:
    run = saved_run(tmp_path / "out", 5)
    made = copier(run, there, transfer=Transfer(is_cancelled=lambda: True))
    with pytest.raises(TransferCancelled):
        made.copy_step(5)
    assert not (run.path / ".copying").exists() and made.pending() == [5]
