"""Whether a configuration continues the run that a directory holds: which keys differ, and which of them may.

Model, data, tokenizer, seed and optimizer identify a run: a start that differs in one of them is another run and is
refused. Every other key is a hyperparameter or a setting: it may change at a resume, and the change is recorded, except
in the sections about operation.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from tamis.config import VOCABULARY, Config, ConfigError, read_yaml
from tamis.config.schema import OPERATION
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import EventLog
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.reading import OddFile, open_regular, read_json
from tamis.run.files.records import TRAINING_HEADER, CsvLog

CONFIG_CHANGED = "config_changed"  # the event of a resume with other hyperparameters
IDENTITY_SECTIONS = ("model", "nsa")
IDENTITY_KEYS = (
    "data.dataset",
    "data.tokenizer",
    "data.vocab_size",
    "data.local_path",
    "data.mixture",
    "data.hub_name",
    "data.hub_subset",
    "data.hub_revision",
    "data.text_column",
    "data.val_fraction",
    "train.seed",
    "train.optimizer",
)
LABELS = ("model.name", "train.out_dir")  # names of the run, without effect on it
SHOWN = 6


class OtherRun(ConfigError):
    """The directory holds a run of another model, data, tokenizer, seed or optimizer; the message names the keys."""


@dataclass(frozen=True)
class ConfigChange:
    """One key whose value differs between two configurations."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.old} → {self.new}"

    @property
    def is_identity(self) -> bool:
        return self.key in IDENTITY_KEYS or self.key.partition(".")[0] in IDENTITY_SECTIONS


def config_changes(old: Mapping[str, Any] | Config, new: Config) -> list[ConfigChange]:
    """Every key that differs. `old` may be the tree of a YAML file of an earlier version; missing keys are defaults."""
    before = old.model_dump() if isinstance(old, Config) else old
    defaults, after = Config().model_dump(), new.model_dump()
    changes = []
    for section, keys in ((name, keys) for name, keys in after.items() if name not in OPERATION):
        stored = before.get(section)
        stored = stored if isinstance(stored, dict) else {}
        for key, value in keys.items():
            dotted, earlier = f"{section}.{key}", stored.get(key, defaults[section][key])
            if dotted not in LABELS and earlier != value and not _is_same_data(dotted, earlier, value):
                changes.append(ConfigChange(dotted, earlier, value))
    return changes


def require_same_run(run: RunDirectory, new: Config) -> list[ConfigChange]:
    """The hyperparameters that a resume here would change; OtherRun when it would not be a resume. Reads only."""
    _require_regular_files(run)
    old = stored_config(run)
    if old is None or not has_begun(run):
        return []
    changes = config_changes(old, new)
    if foreign := [change for change in changes if change.is_identity]:
        raise OtherRun(_refusal(run, foreign))
    return changes


def _require_regular_files(run: RunDirectory) -> None:
    """Refuse a folder, a FIFO or a link in place of a file that every run writes: it would end the trainer later."""
    for path in (run.config_yaml, run.env_json, run.metrics_json, run.training_csv, run.val_csv, run.heartbeat(0)):
        try:
            with suppress(FileNotFoundError):
                os.close(open_regular(path))
        except OddFile as error:
            raise ConfigError(f"{run.path}: {error}. Move it away, or name another train.out_dir") from None


def stored_config(run: RunDirectory) -> dict[str, Any] | None:
    """The sections of OUT/config.yaml; None when there is none that can be read."""
    try:
        return read_yaml(run.config_yaml)
    except ConfigError:
        return None


def has_begun(run: RunDirectory) -> bool:
    """True if a step was logged or saved here: then the directory's records belong to one model and one data set."""
    return bool(run.checkpoint_traces()) or bool(CsvLog(run.training_csv, TRAINING_HEADER).steps())


def is_finished(run: RunDirectory, step: int) -> bool:
    """True if the run ended at this step, its last. metrics.json is written last of all, and removed at each start: a
    run killed before that has its evaluation or its records left to do."""
    try:
        metrics = read_json(run.metrics_json)
    except (OSError, ValueError):
        return False
    return isinstance(metrics, dict) and (metrics.get("exit_code"), metrics.get("steps_done")) == (ExitCode.DONE, step)


def record_changes(events: EventLog, changes: list[ConfigChange], step: int) -> None:
    """Record the hyperparameters that differ from the steps before; nothing when none does."""
    if changes:
        words = "; ".join(map(str, changes))
        values = {change.key: [change.old, change.new] for change in changes}
        events.record(CONFIG_CHANGED, f"from step {step} on: {words}", step=step, changes=values)


def _is_same_data(key: str, old: Any, new: Any) -> bool:
    """True if data or a tokenizer only moved: the old path is gone, is the same place, or has the same content."""
    movable = key == "data.local_path" or (key == "data.tokenizer" and not {old, new} & VOCABULARY.keys())
    if not movable or not isinstance(old, str) or not isinstance(new, str):
        return False
    before, after = Path(old), Path(new)
    try:
        if not before.exists() or before.samefile(after):
            return True
        if before.is_file():
            return before.read_bytes() == after.read_bytes()
        return (before / "manifest.json").read_bytes() == (after / "manifest.json").read_bytes()
    except OSError:
        return False


def _free_name(path: Path) -> Path:
    """The first of NAME_2, NAME_3, … that does not exist."""
    return next(free for n in count(2) if not (free := path.with_name(f"{path.name}_{n}")).exists())


def _refusal(run: RunDirectory, foreign: list[ConfigChange]) -> str:
    words = [f"{change.key}={change.old} (asked for: {change.new})" for change in foreign[:SHOWN]]
    more = f" and {len(foreign) - SHOWN} more keys" if len(foreign) > SHOWN else ""
    return (
        f"{run.path} holds a run with {', '.join(words)}{more}: name another train.out_dir, as "
        f"train.out_dir={_free_name(run.path)}, move that run away (mv {run.path} {run.path}.earlier), "
        "or give its keys to resume it. Nothing was changed"
    )
