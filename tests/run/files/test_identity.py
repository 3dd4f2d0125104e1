"""Which configurations continue a run, and which are another run."""

import os
from pathlib import Path

import pytest

from tamis.config import Config, ConfigError, build_config
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import EventLog, read_events
from tamis.run.files.identity import OtherRun, config_changes, has_begun, record_changes, require_same_run


def config(**sections: dict[str, object]) -> Config:
    tree = {"data": {"dataset": "sample", "tokenizer": "byte"}, "train": {}}
    return build_config({name: tree.get(name, {}) | sections.get(name, {}) for name in {**tree, **sections}})


def begun(path: Path, old: Config) -> RunDirectory:
    run = RunDirectory(path).create()
    run.config_yaml.write_text(old.to_yaml())
    run.training_csv.write_text("step,loss,lr,toks_per_s\n1,2.0,0.1,5\n")
    return run


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "dim", 64),
        ("nsa", "w", 64),
        ("data", "dataset", "synthetic"),
        ("data", "tokenizer", "gpt2"),
        ("data", "hub_subset", "other"),
        ("train", "seed", 7),
    ],
)
def test_another_model_data_tokenizer_or_seed_is_another_run(tmp_path, section, key, value):
    run = begun(tmp_path / "out", config())
    with pytest.raises(OtherRun, match=rf"{section}\.{key}=.*asked for: {value}.*another train\.out_dir, as .*/out_2,"):
        require_same_run(run, config(**{section: {key: value}}))


def test_other_hyperparameters_are_a_resume_and_are_listed_with_old_and_new_value(tmp_path):
    run = begun(tmp_path / "out", config())
    new = config(train={"lr": 1e-4, "seq_len": 1024, "out_dir": "elsewhere"}, model={"name": "mine"})
    changes = require_same_run(run, new)
    assert [str(change) for change in changes] == ["train.seq_len: 2048 → 1024", "train.lr: 0.0002 → 0.0001"]
    record_changes(EventLog(run, by="supervisor"), changes, step=40)
    (event,) = read_events(run)
    assert (event["event"], event["evidence"]["step"]) == ("config_changed", 40)
    assert event["evidence"]["changes"]["train.lr"] == [0.0002, 0.0001]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/etc/hostname")])
@pytest.mark.parametrize("name", ["config.yaml", "metrics.json", "val.csv", "heartbeat_rank0.jsonl"])
def test_a_folder_fifo_or_link_in_place_of_a_run_file_is_refused_before_training(tmp_path, name, make):
    make(tmp_path / name)
    with pytest.raises(ConfigError, match=rf"{name} is a .*Move it away"):
        require_same_run(RunDirectory(tmp_path), config())


def test_a_directory_in_which_no_step_was_done_may_hold_any_run(tmp_path):
    run = RunDirectory(tmp_path / "out").create()
    run.config_yaml.write_text(config().to_yaml())
    assert not has_begun(run)
    assert require_same_run(run, config(model={"dim": 64})) == []


def test_a_stored_config_of_an_earlier_version_is_compared_by_the_keys_it_has(tmp_path):
    run = begun(tmp_path / "out", config())
    run.config_yaml.write_text("data: {dataset: sample, tokenizer: byte, gone: 1}\nold: {x: 2}\n")
    assert require_same_run(run, config()) == []
    run.config_yaml.write_text("- not a config")
    assert require_same_run(run, config(model={"dim": 64})) == []


def test_data_that_only_moved_is_the_same_data(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()

    def changes() -> list[str]:
        before, after = (
            config(data={"dataset": "shards", "tokenizer": "byte", "local_path": str(path)}) for path in (old, new)
        )
        return [change.key for change in config_changes(before, after)]

    assert changes() == ["data.local_path"]
    (old / "manifest.json").write_text("{}")
    (new / "manifest.json").write_text("{}")
    assert changes() == []
    (new / "manifest.json").write_text("{ }")
    assert changes() == ["data.local_path"]
    old.rename(tmp_path / "gone")
    assert changes() == []
