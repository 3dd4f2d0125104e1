"""`tamis run --from URL`: bring back the newest complete copy of a run, verified, to continue it on this machine."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tamis.config import Config, ConfigError, load_config
from tamis.run.copies.copier import own_id
from tamis.run.copies.index import StepCopy, complete_copies, is_tokenizer, newest_first, write_owner
from tamis.run.copies.store import Store, open_store
from tamis.run.files.console import announced, say
from tamis.run.files.directory import RunDirectory
from tamis.run.files.hardware import MIB
from tamis.run.files.identity import require_same_run
from tamis.run.files.lock import RunLock, require_no_trainer
from tamis.run.files.manifest import latest_valid_checkpoint, remove, sha256_of
from tamis.run.files.records import sync_directory


class DamagedCopy(Exception):
    """A copy whose bytes are not those that were sent."""


def fetch_newest(
    url: str, config_path: str | None, overrides: list[str], variables: Sequence[str] = ()
) -> tuple[str, list[str]]:
    """Bring back the newest copy that is complete and undamaged, and take the place over from the machine before.

    `overrides` and `variables` are those of `load_config`. Returns the configuration file to continue with, the copy's
    own unless one is given, and overrides that this machine needs. Nothing of a damaged copy reaches the run directory.
    """
    store = open_store(url)
    with announced(f"looking for the newest copy in {url}"):
        copies = newest_first(complete_copies(store))
    if not copies:
        raise ConfigError(f"{url} holds no complete copy of a run: check the address, which is its copy.to")
    for copy in copies:
        try:
            return _fetch(store, copy, config_path, overrides, variables)
        except DamagedCopy as error:
            say(f"the copy of step {copy.step} is not used: {error}")
    raise ConfigError(f"every copy in {url} is damaged: restore one there, or start without --from")


def _fetch(
    store: Store, copy: StepCopy, config_path: str | None, overrides: list[str], variables: Sequence[str]
) -> tuple[str, list[str]]:
    with tempfile.TemporaryDirectory() as scratch:
        _download(store, copy, ["config.yaml"], Path(scratch))
        config = load_config(config_path or Path(scratch) / "config.yaml", overrides, variables)
    run = RunDirectory(config.train.out_dir).create()
    with RunLock(run.launch_lock) as lock:
        lock.acquire("fetch", check=lambda: _require_free(run, config))
        here = latest_valid_checkpoint(run)
        if here is not None and here >= copy.step:
            say(f"{run.path} has a checkpoint of step {here}, and the newest copy is of step {copy.step}: not fetched")
        else:
            _bring_back(store, copy, run)
        write_owner(store, own_id(run))
    return config_path or str(run.config_yaml), _tokenizer_override(config, run, copy)


def _tokenizer_override(config: Config, run: RunDirectory, copy: StepCopy) -> list[str]:
    """The copy's own tokenizer, if the configuration names a file that this machine does not have."""
    kept = [name for name in copy.files if is_tokenizer(name)]
    if not kept or Path(config.data.tokenizer).exists():
        return []
    return [f"data.tokenizer={json.dumps(str(run.path / kept[0]))}"]


def _require_free(run: RunDirectory, config: Config) -> None:
    require_no_trainer(run)
    require_same_run(run, config)


def _bring_back(store: Store, copy: StepCopy, run: RunDirectory) -> None:
    """Download into a folder of its own, verify everything, then move it into place with the manifest last."""
    stage = run.path / ".fetched"
    size = sum(entry.bytes for entry in copy.files.values())
    with announced(f"fetching the copy of step {copy.step}, {size / MIB:,.1f} MiB"):
        for name in copy.files:
            (stage / name).parent.mkdir(parents=True, exist_ok=True)
        _download(store, copy, list(copy.files), stage)
    checkpoint, manifest = run.checkpoint(copy.step), run.manifest(copy.step)
    remove(manifest)
    remove(checkpoint)
    records = sorted({name.partition("/")[0] for name in copy.files} - {checkpoint.name, manifest.name})
    for name in [*records, checkpoint.name, manifest.name]:
        os.replace(stage / name, run.path / name)
    sync_directory(run.path)
    shutil.rmtree(stage)
    say(f"step {copy.step} is in {run.path}, verified")


def _download(store: Store, copy: StepCopy, names: list[str], target: Path) -> None:
    """Download the files that are not there already; DamagedCopy if one is not what was sent."""
    missing = _differing(copy, names, target)
    try:
        if missing:
            store.get(copy.folder, missing, target)
    except OSError as error:
        there = store.checksums([f"{copy.folder}/{name}" for name in missing])
        if gone := [name for name in missing if f"{copy.folder}/{name}" not in there]:
            raise DamagedCopy(f"{', '.join(gone)} is missing") from None
        raise error
    if damaged := _differing(copy, missing, target):
        for name in damaged:
            (target / name).unlink(missing_ok=True)
        raise DamagedCopy(f"the sha256 of {', '.join(damaged)} is not the one that was sent")


def _differing(copy: StepCopy, names: list[str], target: Path) -> list[str]:
    """The names whose files here are missing or not what was sent."""
    paths = {name: target / name for name in names}
    return [name for name, path in paths.items() if not path.is_file() or sha256_of(path) != copy.files[name].sha256]
