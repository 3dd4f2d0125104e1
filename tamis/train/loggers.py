"""Loggers of the curves (`log.to`): TensorBoard, Weights & Biases, MLflow and trackio behind one small interface.

TensorBoard that cannot be opened is reported and left out; a tracker that the user asked for and that cannot be opened
is an error before the first step.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tamis.config import Config, ConfigError
from tamis.run.files.directory import RunDirectory
from tamis.run.files.records import write_text_atomic
from tamis.train.console import Console


class CurveLogger(Protocol):
    """Writes named numbers and texts of a step."""

    name: str

    def log(self, values: dict[str, float], step: int) -> None: ...

    def log_text(self, name: str, text: str, step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoardLogger:
    name = "TensorBoard"

    def __init__(self, config: Config, run: RunDirectory) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.tensorboard))  # type: ignore[no-untyped-call]

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]

    def log_text(self, name: str, text: str, step: int) -> None:
        self._writer.add_text(name, f"    {text}", step)  # type: ignore[no-untyped-call]  # indented: not Markdown

    def close(self) -> None:
        self._writer.close()  # type: ignore[no-untyped-call]


class _RunLogger:
    """A tracker whose run object logs dictionaries: wandb, and trackio, which has the same interface."""

    _run: Any

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def log_text(self, name: str, text: str, step: int) -> None:
        self._run.log({name: text}, step=step)

    def close(self) -> None:
        self._run.finish()


class WandbLogger(_RunLogger):
    name = "wandb"

    def __init__(self, config: Config, run: RunDirectory) -> None:
        import wandb

        self._run = wandb.init(
            project=config.log.project,
            name=run.path.name,
            id=_kept_name(run, self.name, lambda: uuid.uuid4().hex[:8]),
            resume="allow",
            dir=str(run.path),
            mode="offline" if config.log.offline else None,
            config=config.model_dump(),
            settings=wandb.Settings(console="off", silent=True),
        )


class MlflowLogger:
    name = "mlflow"

    def __init__(self, config: Config, run: RunDirectory) -> None:
        from mlflow import MlflowClient

        if config.log.offline:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(str((run.path / "mlruns").resolve()) if config.log.offline else None)
        self._run_id = _kept_name(run, self.name, lambda: self._start(config, run.path.name))

    def _start(self, config: Config, name: str) -> str:
        from mlflow.entities import Param

        experiment = self._client.get_experiment_by_name(config.log.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(config.log.project)
        run_id = str(self._client.create_run(number, run_name=name).info.run_id)
        params = [Param(key, str(value)[:MOST_PARAM_CHARACTERS]) for key, value in _flat(config).items()]
        for start in range(0, len(params), PARAMS_PER_CALL):
            self._client.log_batch(run_id, params=params[start : start + PARAMS_PER_CALL])
        return run_id

    def log(self, values: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        for start in range(0, len(metrics), METRICS_PER_CALL):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + METRICS_PER_CALL])

    def log_text(self, name: str, text: str, step: int) -> None:
        self._client.log_text(self._run_id, text, f"{name}_step{step}.txt")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class TrackioLogger(_RunLogger):
    name = "trackio"

    def __init__(self, config: Config, run: RunDirectory) -> None:
        if config.log.offline:
            os.environ["TRACKIO_DIR"] = str((run.path / "trackio").resolve())  # read when the package is imported
        import trackio

        keys = {key: str(value) for key, value in _flat(config).items()}
        self._run = trackio.init(config.log.project, name=run.path.name, resume="allow", config=keys, embed=False)


TRACKERS: dict[str, Callable[[Config, RunDirectory], CurveLogger]] = {
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
    "trackio": TrackioLogger,
}
PACKAGES = {"mlflow": "mlflow-skinny"}
PARAMS_PER_CALL, METRICS_PER_CALL, MOST_PARAM_CHARACTERS = 100, 1000, 500  # limits of MLflow


def open_loggers(config: Config, run: RunDirectory, console: Console) -> list[CurveLogger]:
    """Open every logger of `log.to`."""
    loggers: list[CurveLogger] = []
    if config.train.tensorboard and "tensorboard" in config.log.names:
        try:
            loggers.append(TensorBoardLogger(config, run))
        except (ImportError, OSError) as error:
            console.say(f"TensorBoard is off: {error}")
    return loggers + [_opened(name, config, run) for name in TRACKERS if name in config.log.names]


def _opened(name: str, config: Config, run: RunDirectory) -> CurveLogger:
    try:
        return TRACKERS[name](config, run)
    except ImportError as error:
        package = PACKAGES.get(name, name)
        raise ConfigError(f"log.to names {name}, and {error}: pip install {package}, or change log.to") from None
    except Exception as error:  # the packages raise anything: no key, no network, a refused project
        problem = " ".join(str(error).split())
        raise ConfigError(
            f"log.to names {name}, which cannot be opened ({problem}): log in to it, set log.offline=true, "
            "or change log.to"
        ) from None


def _flat(config: Config) -> dict[str, Any]:
    """Every key as `section.key`."""
    return {f"{section}.{key}": v for section, keys in config.model_dump().items() for key, v in keys.items()}


def _kept_name(run: RunDirectory, tracker: str, make: Callable[[], str]) -> str:
    """The name of this run in a tracker, kept in OUT so that a resume continues the same curves."""
    file = Path(run.path) / f"{tracker}_run"
    if not file.exists():
        write_text_atomic(file, make())
    return file.read_text(encoding="utf-8").strip()
