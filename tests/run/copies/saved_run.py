"""A run directory with checkpoints, as a trainer leaves them."""

from pathlib import Path

from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import EventLog
from tamis.run.files.manifest import write_manifest
from tamis.run.files.records import TRAINING_HEADER, VAL_HEADER, CsvLog
from tests.faults.launched import tiny_config

BYTES = 3 << 20


def saved_run(out: Path, *steps: int, steps_planned: int = 100) -> RunDirectory:
    run = RunDirectory(out).create()
    config = tiny_config(out, steps=steps_planned)
    run.config_yaml.write_text(config.to_yaml())
    EventLog(run, by="supervisor").record("start", "1 worker from the beginning")
    for step in steps:
        save(run, step)
    return run


def save(run: RunDirectory, step: int, word: str = "") -> None:
    """Log a row and save a checkpoint, whose content depends on the step and a word."""
    CsvLog(run.training_csv, TRAINING_HEADER).append(step, 3.0, 1e-4, 1000.0)
    CsvLog(run.val_csv, VAL_HEADER).append(step, 3.0, 20.0)
    line = f"weights of step {step} {word}\n".encode()
    run.checkpoint(step).write_bytes(line * (BYTES // len(line)))
    write_manifest(run, step, config_hash="0123456789ab")


def save_folder(run: RunDirectory, step: int) -> None:
    """Save a checkpoint that two processes wrote together."""
    run.checkpoint(step).mkdir()
    for name in ("__0_0.distcp", ".metadata"):
        (run.checkpoint(step) / name).write_bytes(name.encode() * 1000)
    write_manifest(run, step, config_hash="0123456789ab")
