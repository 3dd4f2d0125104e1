"""Settings of the whole suite: one thread per process, the longest files first, and the same examples each time."""

import gc
import os

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
    "tests.test_production_runbooks",
    "tests.faults.test_real_trainer",
    "tests.test_runbooks",
    "tests.test_clean_install",
    "tests.attention.kernels.test_compile",
    "tests.faults.test_torchrun",
    "tests.faults.test_supervised_faults",
    "tests.model.test_compile",
    "tests.attention.kernels.test_selected",
    "tests.attention.test_decode",
    "tests.attention.kernels.test_copied",
    "tests.attention.test_packing",
    "tests.train.test_distributed_faults",
    "tests.train.test_distributed_machines",
    "tests.faults.test_stopping",
    "tests.model.test_cache",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first; the order within a file stays."""
    rank = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.module.__name__, len(rank)))


def pytest_collection_finish() -> None:
    """Let no garbage collection visit what was imported and collected."""
    gc.freeze()
    gc.enable()
