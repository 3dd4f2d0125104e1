"""The halt file: fresh ones are honoured once, stale ones are reported and removed."""

import os
import time
from pathlib import Path

from tamis.run.files.halt import HaltFile


def test_a_touched_file_asks_for_a_halt_until_it_is_consumed(tmp_path: Path) -> None:
    halt = HaltFile(tmp_path / ".HALT")
    assert not halt.requested()
    (tmp_path / ".HALT").touch()
    assert halt.requested()
    assert halt.consume() == "asked for by .HALT"
    assert not halt.requested()


def test_the_reason_is_kept(tmp_path: Path) -> None:
    halt = HaltFile(tmp_path / ".HALT")
    halt.request("power cut at noon")
    assert halt.reason() == "power cut at noon" and halt.consume() == "power cut at noon"
    assert halt.consume() == "asked for by .HALT"  # consuming twice is harmless


def test_a_file_from_before_the_start_is_reported_and_removed(tmp_path: Path) -> None:
    halt = HaltFile(tmp_path / ".HALT")
    halt.request("an old wish")
    os.utime(halt.path, (1_000_000, 1_000_000))
    assert not halt.requested(since_ts=time.time() - 60)
    message = halt.discard_stale(time.time())
    assert message is not None and "stale" in message and "an old wish" in message
    assert not halt.path.exists()
    assert halt.discard_stale(time.time()) is None


def test_a_file_written_while_the_run_starts_is_not_stale(tmp_path: Path) -> None:
    halt, started = HaltFile(tmp_path / ".HALT"), time.time() - 1
    halt.request("now")
    assert halt.discard_stale(started) is None
    assert halt.requested(started)
