"""Every threshold of supervision and judgement in one place: what the watchdog, the phases and the alerts tolerate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tamis.config import Config
from tamis.config.size import random_token_floor

# Health of what the run learns (supervise/health_rules.py, checks)
AGREEING_BEATS = 5  # logged beats in a row that must agree before an alarm is raised
ZERO_GRADIENT = 1e-9
EXPLODED_TIMES = 100.0  # times the run's own median gradient norm
COLLAPSED_ENTROPY = 0.25  # nats
LOW_ENTROPY = 0.5  # nats; the phase criterion
COLLAPSED_FRACTION = 0.5  # share of heads, for an alarm
GATES_LEARN_WITHIN_STEPS = 1000
GATES_MOVED = 1e-3  # of a share, or nats
DIVERGED_NATS = 1.0  # above the best level reached, and by a third of it
CREEP_GIB = 0.5
CREEP_SHARE = 0.05
PLAUSIBLE_LOSS = {"gpt2": 1.0, "byte": 0.3}  # nats per token; models a hundred times larger stay above on unseen text

# Speed (supervise/stall_rules.py, supervise/history.py, supervise/usage.py)
SLOW_STRETCHES = 4  # in a row
STRETCH_S = 30.0  # throughput is compared over stretches of at least this time and STRETCH_STEPS steps
STRETCH_STEPS = 5
SETTLED_STEPS = 100  # timed steps of one process after which its longest step is known well
JUDGED_STEPS = 20  # the median of so many steps decides whether a rank is slow or starved of data
SLOWED_WITHIN_S = 60.0  # a GPU that heat or a fault slows down in more than SLOWED_SHARE of its samples of this time
SLOWED_SHARE = 0.5
LEAST_GPU_SAMPLES = 30
DEAD_AFTER_S = 3.0  # of a process that just ended the last beats may be unread, and its parent may not have noticed
LONGEST_TICK_S = 30.0  # a longer gap between two looks means that the watchdog itself did not run

# Criteria of the phases and runbooks (checks/criteria)
LEAST_ROWS_FOR_TREND = 4
LEAST_STEPS_FOR_STEADINESS = 20
WARM_UP_STEPS = 5  # the first steps compile, allocate and fill caches
SLOWEST_TO_MEDIAN = 3.0  # p95 of step times
DRIFT = 1.5  # last quarter against first
THROUGHPUT_SPREAD = 0.5  # slowest tenth of the logged rows against the median
LEAST_TOKENS_PER_S = 39  # the launch plan's floor; a real M7C run is thousands of times above it
ESTIMATE_TOLERANCE = 0.20
LARGEST_FETCH_SHARE = 0.2  # of a step's time may be spent waiting for data
LEAST_BUSY_PERCENT = 80
LARGEST_IMBALANCE_POINTS = 15  # between the busiest and the idlest GPU
LARGEST_MEMORY_GROWTH = 0.02  # second half against first
LARGEST_MEMORY_SHARE = 0.95  # of a GPU, where train.max_memory_gb is more
LARGEST_COLLAPSE_FRACTION = 0.05  # share of heads, for the phase criterion
LEAST_DISTINCT_BLOCKS = 0.05  # share of the older blocks that a layer must select at least once
PILOT_HOURS = 2.0

# Preflight (checks/machine.py)
CPU_FLOPS_PER_CORE = 50e9  # more than training reaches on today's cores: the estimate is a lower bound
CPU_HOURS = 24.0


@dataclass(frozen=True)
class Limits:
    """What the watchdog tolerates in one run. Times in seconds; the stall limit is learned within these bounds."""

    floor_s: float = 120.0  # a shorter silence between steps is never a stall …
    settled_floor_s: float = 30.0  # … nor is this one after SETTLED_STEPS steps in succession
    stopped_s: float = 10.0  # a process that is stopped (SIGSTOP, a debugger) for so long is reported
    times_typical: float = 20.0  # silence over this many typical steps is a stall …
    times_longest: float = 3.0  # … if it is also this many times the longest step seen
    first_step_s: float = 1800.0  # a process's first step compiles and tunes kernels
    fetch_s: float = 180.0  # the loader gives up before that
    phase_s: Mapping[str, float] = field(
        default_factory=lambda: {
            "boot": 900.0,
            "loader_ready": 900.0,  # the first fetch fills the shuffle and the prefetch
            "compile": 3600.0,
            "eval": 900.0,
            "checkpoint": 1800.0,
            "done": 300.0,
            "halted": 300.0,
            "failed": 300.0,
        }
    )
    loss_floor: float | None = None  # nats; a lower training loss is implausible
    throughput_collapse: float = 0.08  # share of the run's own median speed; steps varying tenfold stay above it
    slow_share: float = 1 / 3  # below this share the run is reported as slow and goes on
    expected_step_s: float | None = None  # from an estimate of this machine; compared until the run has its own speed


@dataclass(frozen=True)
class Grace:
    """Seconds that each stage of an escalation lasts before the next."""

    dump_s: float = 90.0  # py-spy needs time to read the symbols of a large process
    halt_s: float = 30.0
    term_s: float = 27.0  # a worker exits within 25 s of TERM
    cost_s: float = 300.0  # at the cost limit, an evaluation or a save may finish before TERM
    orphan_s: float = 30.0  # the sidecars of a dead supervisor's workers end them within 25 s


def limits_for(config: Config) -> Limits:
    """The limits that follow from a run's configuration."""
    if config.train.min_loss is not None:
        loss_floor = config.train.min_loss
    elif config.data.dataset == "synthetic":
        loss_floor = random_token_floor(config)
    else:
        loss_floor = PLAUSIBLE_LOSS.get(config.data.tokenizer, PLAUSIBLE_LOSS["gpt2"])
    return Limits(loss_floor=loss_floor, fetch_s=config.data.loader_timeout_s + 60)
