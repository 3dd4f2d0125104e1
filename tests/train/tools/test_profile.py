"""What `tamis profile` reads off the profiler's rows."""

from types import SimpleNamespace

from tamis.train.tools.profile import host_ms_per_step


def test_the_device_row_of_a_range_does_not_hide_what_the_range_cost_the_host() -> None:
    rows = [("fetch", 300.0), ("optimizer", 900.0), ("_dq_kernel", 0.0), ("optimizer", 0.0)]
    parts = host_ms_per_step([SimpleNamespace(key=key, cpu_time_total=us) for key, us in rows], steps=3)
    assert parts == {"fetch": 0.1, "optimizer": 0.3}
