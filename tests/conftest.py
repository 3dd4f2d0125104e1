"""Settings of the whole suite: one thread per process, the longest files first, and the same examples each time."""

import gc
import os
import sys
from typing import Any

gc.disable()  # imports and collected tests make no garbage; pytest_collection_finish enables it

# Before torch loads, and inherited by processes tests start: on few cores spinning OpenMP threads starve each other.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

from tamis.config.process import set_process_defaults  # noqa: E402

set_process_defaults()

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any test imports one
    from tests.interpreter import repeat_nothing

    repeat_nothing()

settings.register_profile("tamis", deadline=None, derandomize=True)
settings.load_profile("tamis")

# A long file that starts when the other processes are done would be waited for alone. Files not named are short.
LONGEST = (
    "tests.faults.test_supervised_faults",
    "tests.faults.test_real_trainer",
    "tests.train.test_distributed_faults",
    "tests.train.test_resume",
    "tests.test_production_runbooks",
    "tests.test_runbooks",
    "tests.test_clean_install",
    "tests.remote.test_remote",
    "tests.faults.test_torchrun",
    "tests.attention.compiled.test_compile",
    "tests.model.test_compile",
    "tests.attention.test_decode",
    "tests.test_readme",
    "tests.run.copies.test_child_process",
    "tests.data.test_hub",
    "tests.model.test_cache",
    "tests.attention.test_packing",
    "tests.attention.kernels.test_selected",
    "tests.faults.test_stopping",
    "tests.attention.test_library",
    "tests.cli.test_launch",
    "tests.attention.test_reference",
    "tests.bench.test_needle",
)

# Their tests fork ranks from a server that takes four seconds to start, one in each process.
FORKING = (("tests/train/test_distributed",), ("tests/train/", "tests/checkpoint/"))


@pytest.fixture(autouse=True)
def no_tapes() -> None:
    """Forget the calls of earlier tests: a test may change what their tapes depend on."""
    if (tape := sys.modules.get("tamis.attention.kernels.tape")) is not None:
        tape.forget()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first; the order within a file stays."""
    rank = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.module.__name__, len(rank)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a file to one process, as `--dist loadscope` does, and files that fork ranks to two of all."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((group[0] for group in FORKING if file.startswith(group)), file)

    return Scheduling(config, log) if config.getvalue("dist") == "loadscope" else None


def pytest_collection_finish() -> None:
    """Let no garbage collection visit what was imported and collected."""
    gc.freeze()
    gc.enable()
