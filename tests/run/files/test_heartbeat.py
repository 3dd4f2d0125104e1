"""The heartbeat's writer, readers and schema."""

import json
import math
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.run.files.heartbeat import Heartbeat, HeartbeatFollower, HeartbeatWriter, previous_file, read_heartbeats


def test_a_heartbeat_reads_back_as_it_was_written(tmp_path: Path) -> None:
    writer = HeartbeatWriter(tmp_path / "beat", rank=3)
    writer.beat("boot", 0)
    shares = [[0.2, 0.3, 0.5], [1 / 3, 1 / 3, 1 / 3]]
    writer.beat("step_end", 7, loss=2.5, lr=1e-4, grad_norm=0.5, gate_shares=shares, detail="ünd")
    boot, end = read_heartbeats(tmp_path / "beat")
    assert (boot.phase, boot.step, boot.rank, boot.loss) == ("boot", 0, 3, None)
    assert (end.step, end.loss, end.lr, end.gate_shares, end.detail) == (7, 2.5, 1e-4, shares, "ünd")
    assert end.mono >= boot.mono and end.ts >= boot.ts


def test_non_finite_numbers_are_valid_json_and_come_back(tmp_path: Path) -> None:
    writer = HeartbeatWriter(tmp_path / "beat", rank=0)
    writer.beat("step_end", 1, loss=math.nan, grad_norm=math.inf, gate_entropy=[1.0, -math.inf])
    json.loads((tmp_path / "beat").read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    (beat,) = read_heartbeats(tmp_path / "beat")
    assert beat.loss is not None and math.isnan(beat.loss)
    assert beat.grad_norm == math.inf and beat.gate_entropy == [1.0, -math.inf]


def test_only_names_of_the_schema_can_be_written(tmp_path: Path) -> None:
    writer = HeartbeatWriter(tmp_path / "beat", rank=0)
    with pytest.raises(ValueError, match="gpu_mem_mb"):
        writer.beat("step_end", 1, gpu_mem_mb=3)
    with pytest.raises(ValueError, match="jogging"):
        writer.beat("jogging", 1)  # type: ignore[arg-type]
    assert read_heartbeats(tmp_path / "beat") == []


def test_a_side_thread_cannot_fake_progress(tmp_path: Path) -> None:
    writer = HeartbeatWriter(tmp_path / "beat", rank=0)
    caught: list[BaseException] = []

    def fake() -> None:
        try:
            writer.beat("step_end", 99)
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=fake)
    thread.start()
    thread.join()
    assert len(caught) == 1
    assert read_heartbeats(tmp_path / "beat") == []


@given(cut=st.integers(0, 400))
@settings(max_examples=40, deadline=None)
def test_a_file_cut_anywhere_gives_the_complete_beats_and_can_be_continued(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("beats") / "beat"
    writer = HeartbeatWriter(path, rank=0)
    for step in range(1, 5):
        writer.beat("step_end", step, loss=1.5)
    content = path.read_bytes()[:cut]
    path.write_bytes(content)
    complete = content.count(b"\n")
    assert [beat.step for beat in read_heartbeats(path)] in (
        list(range(1, complete + 1)),
        list(range(1, complete + 2)),  # cut just before the newline: the beat itself is whole
    )
    HeartbeatWriter(path, rank=0).beat("boot", 9)
    assert read_heartbeats(path)[-1].step == 9


def test_two_files_bound_the_disk_and_the_newest_beats_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "beat"
    writer = HeartbeatWriter(path, rank=0, max_bytes=4000)
    for step in range(1000):
        writer.beat("step_end", step)
    assert path.stat().st_size <= 4000 and previous_file(path).stat().st_size <= 4000
    assert len(list(tmp_path.iterdir())) == 2
    steps = [beat.step for beat in read_heartbeats(path)]
    assert steps == list(range(steps[0], 1000)) and len(steps) > 30
    assert [beat.step for beat in read_heartbeats(path, tail=25)] == list(range(975, 1000))


def test_the_tail_of_a_long_file_is_its_last_beats(tmp_path: Path) -> None:
    writer = HeartbeatWriter(tmp_path / "beat", rank=0)
    for step in range(5000):
        writer.beat("progress", step)
    assert [beat.step for beat in read_heartbeats(tmp_path / "beat", tail=3)] == [4997, 4998, 4999]
    assert read_heartbeats(tmp_path / "nowhere", tail=3) == []


def test_a_follower_sees_every_beat_once_through_rotation_and_half_lines(tmp_path: Path) -> None:
    path = tmp_path / "beat"
    follower = HeartbeatFollower(path)
    assert follower.poll() == []
    writer = HeartbeatWriter(path, rank=0, max_bytes=1500)
    seen: list[int] = []
    for step in range(200):
        writer.beat("step_end", step)
        if step % 3 == 0:
            seen += [beat.step for beat in follower.poll()]
    seen += [beat.step for beat in follower.poll()]
    assert seen == list(range(200))
    with open(path, "a") as file:
        file.write('{"ts": 1, "mo')
    assert follower.poll() == []


def test_a_full_disk_costs_the_beat_and_not_the_training(tmp_path: Path) -> None:
    writer = HeartbeatWriter(tmp_path / "beat", rank=0)
    import os

    os.close(writer._descriptor)
    writer._descriptor = os.open("/dev/full", os.O_WRONLY)
    writer.beat("step_end", 1)
    assert writer.lost == 1


def test_a_line_of_a_later_version_is_still_a_beat() -> None:
    line = '{"ts":1,"mono":2,"rank":0,"pid":4,"step":5,"phase":"eval","unheard_of":6}'
    beat = Heartbeat.from_line(line)
    assert beat is not None and beat.step == 5
    assert Heartbeat.from_line('{"ts":1}') is None
    assert Heartbeat.from_line("[1,2]") is None
