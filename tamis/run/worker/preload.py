"""The process of a spare worker: imports what a worker imports, and becomes one when it is given arguments.

`python -m tamis.run.worker.preload MODULE` imports MODULE and waits for one line of JSON on stdin, a list of arguments.
It then runs MODULE as `python -m MODULE ARGUMENTS` does. When stdin closes without a line, it exits.

Until then it opens no file of the run and no device. Its imports run at the lowest priority, and where memory is short
the kernel ends it first.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import sys
import threading
from pathlib import Path

from tamis.config.process import set_process_defaults

LOWEST_PRIORITY = 19
OOM_SCORE = Path("/proc/self/oom_score_adj")
FIRST_TO_END = "1000"


def import_in_background(module: str) -> bool:
    """Import a module at the lowest priority; returns whether it succeeded.

    In a thread, because a priority belongs to a thread, and only root can raise one again.
    """
    succeeded = []

    def load() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        importlib.import_module(module)
        if (torch := sys.modules.get("torch")) and torch.backends.cuda.is_built():
            importlib.import_module("torch._dynamo")  # for a GPU, where the step is compiled
        succeeded.append(True)

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    return bool(succeeded)


def set_oom_score(score: str) -> str:
    """Set how readily the kernel ends this process when memory is short; returns the score before."""
    before = ""
    with contextlib.suppress(OSError):
        before = OOM_SCORE.read_text()
        OOM_SCORE.write_text(score)
    return before


def main() -> int:
    module = sys.argv[1]
    set_process_defaults()  # before torch loads
    score = set_oom_score(FIRST_TO_END)
    gc.disable()  # imports make no garbage
    if not import_in_background(module):
        return 1
    gc.freeze()
    gc.enable()
    if not (line := sys.stdin.readline()):
        return 0
    set_oom_score(score)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.argv[1:] = json.loads(line)
    del sys.modules[module]  # it runs as __main__; what it imported stays
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
