"""Launches in this process over the trainer without a model."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tamis.config import Config, build_config
from tamis.run import launch
from tamis.run.supervise.restarts import RestartBudget
from tamis.run.supervise.supervisor import LaunchOptions, supervise
from tests.faults.launched import fake_command, tiny_config


def config_for(out: Path, *, steps: int = 10, **sections: dict[str, Any]) -> Config:
    return build_config(tiny_config(out, steps).model_dump() | sections)


def launch_fake(config: Config) -> int:
    """`tamis launch` of one configuration."""
    return launch.launch_once(launch.Job(config, "mine.yaml", processes=1, gpus=[], restarts=3, started=time.time()))


def supervise_fake(config: Config, *, options: LaunchOptions, **_: Any) -> int:
    budget = RestartBudget(first_delay_s=0.05)
    return supervise(config, options=replace(options, command=fake_command, look_every_s=0.05, budget=budget))
