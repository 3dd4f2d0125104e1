"""`tamis eval RUN`: bits per byte on held-out text and accuracy on tasks; a table, and eval.json in the run.

Another text has a name of its own in eval.json: its figure never takes the place of that of the held-out text.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tamis.data import DataError
from tamis.evaluate.held_out import bits_per_byte, held_out_batches, text_batches
from tamis.evaluate.scoring import TaskResult, score_task
from tamis.evaluate.tasks import Task, read_tasks
from tamis.generate.load import LoadedModel, load_model
from tamis.run.files.console import announced, say
from tamis.run.files.directory import RunDirectory
from tamis.run.files.reading import read_json
from tamis.run.files.records import utc, write_json_atomic


def evaluate_model(
    checkpoint: str | Path,
    tasks: str | Path | None = None,
    *,
    shots: int | None = None,
    limit: int | None = None,
    text: str | Path | None = None,
    max_len: int | None = None,
    device: str = "auto",
    precision: str | None = None,
) -> dict[str, Any]:
    """Evaluate a checkpoint, print a table, write eval.json next to the checkpoint, and return its content.

    Args:
        tasks: folder of JSONL files; without it only the held-out text is measured.
        text: a file to measure bits per byte on, instead of the run's own held-out text. What eval.json has of the
            held-out text stays, and without `tasks` also what it has of tasks.
    """
    wanted = read_tasks(tasks, shots, limit) if tasks is not None else []  # refused before the model loads
    with announced(f"loading {checkpoint}"):
        loaded = load_model(checkpoint, max_len=max_len, device=device, precision=precision)
    weight = loaded.model.embedding.weight
    say(f"{loaded.source}: step {loaded.step}, {weight.dtype} on {weight.device}", sys.stderr)
    figures = {task.name: _measure_task(loaded, task) for task in wanted}
    centred = [of_task["centred"] for of_task in figures.values()]
    measured = {
        "step": loaded.step,
        "time": utc(time.time()),
        "device": str(weight.device.type),
        "precision": str(weight.dtype).removeprefix("torch."),
    }
    bits = _measure_text(loaded, text)
    results = {
        **measured,
        "limit": limit,
        "bits_per_byte": bits if text is None else None,
        "tasks": figures,
        "mean_centred": round(sum(centred) / len(centred), 4) if centred else None,
        "texts": {} if text is None else {Path(text).name: {**measured, "bits_per_byte": bits}},
    }
    print("\n".join(table_of(results)), flush=True)
    path = _folder_of(Path(checkpoint)).eval_json
    results = _with_earlier(results, path)
    write_json_atomic(path, results)
    say(f"written: {path}", sys.stderr)
    return results


def _with_earlier(results: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the results with figures of an earlier eval.json that this evaluation did not measure again."""
    try:
        earlier = read_json(path)
        texts = {**earlier.get("texts", {}), **results["texts"]}
        if results["texts"] and not results["tasks"]:  # texts alone: everything else is as it was
            return {**results, **earlier, "texts": texts}
        alike = all(earlier.get(key) == results[key] for key in ("step", "device", "precision"))
    except (OSError, ValueError, TypeError, AttributeError):  # none yet, or an odd one
        return results
    held_out = earlier.get("bits_per_byte") if results["texts"] and alike else results["bits_per_byte"]
    return {**results, "bits_per_byte": held_out, "texts": texts}


def _folder_of(checkpoint: Path) -> RunDirectory:
    """Return the run or exported folder that `checkpoint` is, or lies in."""
    is_folder = checkpoint.is_dir() and checkpoint.suffix != ".pt"
    return RunDirectory(checkpoint if is_folder else checkpoint.parent)


def _measure_text(loaded: LoadedModel, text: str | Path | None) -> float | None:
    """Return bits per byte; None, with the reason printed, where the run's own text cannot be read."""
    if text is not None:
        batches, packed = text_batches(loaded, text), False
    else:
        try:
            batches, packed = held_out_batches(loaded), loaded.config.data.packing == "documents"
        except DataError as error:
            say(f"bits per byte are not measured, give a file by --text: {error}", sys.stderr)
            return None
    with announced(f"measuring bits per byte on {_named(text)}") as tell:
        bits = bits_per_byte(loaded.model, loaded.tokenizer, _told(batches, tell), packed)
    return None if bits is None else round(bits, 5)


def _named(text: str | Path | None) -> str:
    return "held-out text" if text is None else f"the text {Path(text).name}"


def _told(batches: list[np.ndarray], tell: Callable[[object], None]) -> Iterator[np.ndarray]:
    for number, batch in enumerate(batches, 1):
        tell(f"batch {number} of {len(batches)}")
        yield batch


def _measure_task(loaded: LoadedModel, task: Task) -> dict[str, Any]:
    with announced(f"scoring {task.name}") as tell:
        result, _ = score_task(loaded.model, loaded.tokenizer, task, lambda share: tell(f"{share:.0%} done"))
    return _figures(task, result)


def _figures(task: Task, result: TaskResult) -> dict[str, Any]:
    names = ("accuracy", "standard_error", "acc", "acc_norm", "chance", "centred")
    figures = {name: round(getattr(result, name), 4) for name in names}
    return {"kind": task.kind, "examples": result.examples, "shots": result.shots, **figures}


def table_of(results: dict[str, Any]) -> list[str]:
    """Return the lines of the table that `tamis eval` prints for what it measured: one text, and the tasks."""
    lines = [f"{'task':<24}{'examples':>9}{'shots':>6}{'accuracy':>10}{'±':>8}{'chance':>8}{'centred':>9}"]
    for name, f in results["tasks"].items():
        lines.append(
            f"{name:<24}{f['examples']:>9,}{f['shots']:>6}{f['accuracy']:>10.4f}{f['standard_error']:>8.4f}"
            f"{f['chance']:>8.4f}{f['centred']:>9.4f}"
        )
    if not results["tasks"]:
        lines = []
    elif results["mean_centred"] is not None:
        lines.append(f"{'mean of the centred scores':<65}{results['mean_centred']:>9.4f}")
    texts = {_named(name): of_text["bits_per_byte"] for name, of_text in results["texts"].items()}
    for name, bits in (texts or {_named(None): results["bits_per_byte"]}).items():
        lines.append(f"bits per byte on {name}: {'not measured' if bits is None else f'{bits:.4f}'}")
    return lines
