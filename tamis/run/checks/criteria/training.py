"""Criteria on the training itself: steps done, losses, step times, throughput, data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, median

from tamis.run.checks.evidence import Evidence
from tamis.run.checks.findings import Finding, failed, not_applicable, not_measured, pass_if, passed
from tamis.run.files.heartbeat import Heartbeat
from tamis.run.files.lock import RunLock
from tamis.run.limits import (
    DRIFT,
    ESTIMATE_TOLERANCE,
    LARGEST_FETCH_SHARE,
    LEAST_ROWS_FOR_TREND,
    LEAST_STEPS_FOR_STEADINESS,
    LEAST_TOKENS_PER_S,
    SLOWEST_TO_MEDIAN,
    THROUGHPUT_SPREAD,
    WARM_UP_STEPS,
)


def completed(evidence: Evidence) -> Finding:
    last = evidence.last_beat
    if last is None:
        return failed("no heartbeat was written")
    if evidence.config is None:
        return failed("config.yaml is missing, so the number of planned steps is unknown")
    steps = evidence.config.train.steps
    done = evidence.last_step >= steps
    return pass_if(done, f"{evidence.last_step} of {steps} steps on every rank; last phase {last.phase}", last.ts)


def goal_reached(evidence: Evidence) -> Finding:
    """Like `completed`, but a run that is halted or still under way can reach its goal later."""
    finding, last = completed(evidence), evidence.last_beat
    if (
        finding.status == "fail"
        and last
        and (last.phase == "halted" or RunLock(evidence.directory.trainer_lock).is_held())
    ):
        return not_measured(finding.evidence)
    return finding


def heartbeats_on_every_rank(evidence: Evidence) -> Finding:
    """Require a finished step of every rank, and all phases of a step from rank 0."""
    if evidence.processes is None:
        return not_measured("run.info does not hold the number of processes")
    silent = [rank for rank in range(evidence.processes) if not evidence.step_ends.get(rank)]
    if silent:
        return failed(f"no step_end from rank {', '.join(map(str, silent))} of {evidence.processes}")
    missing = {"step_start", "progress", "step_end"} - {beat.phase for beat in evidence.beats[0]}
    if missing:
        return failed(f"rank 0 never wrote {', '.join(sorted(missing))}")
    return passed(f"{evidence.processes} of {evidence.processes} ranks ended steps", evidence.step_ends[0][0].ts)


def loss_finite(evidence: Evidence) -> Finding:
    losses = _losses(evidence)
    if not losses:
        return failed("no loss was recorded")
    bad = next(((step, loss) for step, loss in losses if not math.isfinite(loss)), None)
    if bad:
        return failed(f"loss {bad[1]} at step {bad[0]}")
    return passed(f"{len(losses)} losses, all finite; last {losses[-1][1]:.4f} at step {losses[-1][0]}", _end(evidence))


def loss_falling(evidence: Evidence) -> Finding:
    losses = [loss for _, loss in _losses(evidence)]
    if not losses:
        return failed("no loss was recorded")
    if len(losses) < LEAST_ROWS_FOR_TREND:
        return not_measured(f"{len(losses)} losses are too few for a trend")
    third = max(1, len(losses) // 3)
    first, last = mean(losses[:third]), mean(losses[-third:])
    return pass_if(last < first, f"mean of the first third {first:.4f}, of the last {last:.4f}", _end(evidence))


def step_times_steady(evidence: Evidence) -> Finding:
    if not evidence.step_ends:
        return failed("no heartbeat was written")
    by_rank = [_steadiness(rank, _step_times(ends)) for rank, ends in evidence.step_ends.items()]
    failures = [finding for finding in by_rank if finding.status == "fail"]
    return failures[0] if failures else by_rank[0]


def _steadiness(rank: int, times: list[float]) -> Finding:
    if len(times) < LEAST_STEPS_FOR_STEADINESS:
        return not_measured(f"rank {rank}: {len(times)} timed steps, at least {LEAST_STEPS_FOR_STEADINESS} needed")
    typical, slow = median(times), _percentile(times, 95)
    quarter = len(times) // 4
    drift = median(times[-quarter:]) / median(times[:quarter])
    steady = slow <= SLOWEST_TO_MEDIAN * typical and drift <= DRIFT
    return pass_if(
        steady,
        f"rank {rank}: median {typical * 1e3:.1f} ms, p95 {slow * 1e3:.1f} ms (limit {SLOWEST_TO_MEDIAN:g}× median), "
        f"last quarter {drift:.2f}× the first (limit {DRIFT:g}×)",
    )


def throughput_stable(evidence: Evidence) -> Finding:
    speeds = _speeds(evidence)[1:]  # the first includes compilation
    if len(speeds) < LEAST_ROWS_FOR_TREND:
        return not_measured(f"{len(speeds)} logged speeds after the first are too few")
    typical, slow = median(speeds), _percentile(speeds, 10)
    return pass_if(
        slow >= THROUGHPUT_SPREAD * typical > 0,
        f"median {typical:,.0f} tok/s, slowest tenth {slow:,.0f} (at least {THROUGHPUT_SPREAD:.0%} of the median)",
        _end(evidence),
    )


def throughput_over_floor(evidence: Evidence) -> Finding:
    measured = _typical_throughput(evidence)
    if measured is None:
        return failed("no throughput was recorded")
    return pass_if(measured >= LEAST_TOKENS_PER_S, f"median {measured:,.0f} tok/s, at least {LEAST_TOKENS_PER_S}")


def throughput_near_estimate(evidence: Evidence) -> Finding:
    """Allow 20% on both sides: too fast points to a wrong model, too slow to a wrong setting."""
    estimate = evidence.info.get("estimate_toks_per_s")
    if not estimate and not evidence.uses_gpus:
        return not_applicable("an estimate is made for runs on GPUs only")
    if not estimate:
        return not_measured("run.info holds no measured estimate for this machine (tamis estimate makes one)")
    measured = _typical_throughput(evidence)
    if measured is None:
        return failed("no throughput was recorded")
    return pass_if(
        abs(measured / estimate - 1) <= ESTIMATE_TOLERANCE,
        f"median {measured:,.0f} tok/s, {measured / estimate:.0%} of the estimate {estimate:,.0f} (±20%)",
    )


def data_keeps_up(evidence: Evidence) -> Finding:
    ends = evidence.step_ends.get(0, [])[WARM_UP_STEPS:]
    timed = [(beat.dt_fetch_s, beat.dt_step_s) for beat in ends if beat.dt_fetch_s is not None and beat.dt_step_s]
    if not timed:
        return not_measured("no step after the warm-up has a fetch time")
    share = sum(fetch for fetch, _ in timed) / sum(step for _, step in timed)  # type: ignore[misc]
    slowest = max(fetch for fetch, _ in timed)
    return pass_if(share <= LARGEST_FETCH_SHARE, f"{share:.1%} of the time waits for data; longest {slowest:.2f} s")


def _typical_throughput(evidence: Evidence) -> float | None:
    """Median tokens per second of all ranks together, over the steps after the warm-up."""
    ends = evidence.step_ends.get(0, [])
    speeds = [beat.toks_per_s for beat in ends[WARM_UP_STEPS:] or ends if beat.toks_per_s]
    speeds = speeds or [row.toks_per_s for row in evidence.training]
    return median(speeds) if speeds else None


def _speeds(evidence: Evidence) -> list[float]:
    """Logged tokens per second; from the heartbeats where train.csv is false."""
    if evidence.training:
        return [row.toks_per_s for row in evidence.training]
    return [beat.toks_per_s for beat in evidence.step_ends.get(0, []) if beat.toks_per_s]


def _percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(percent / 100 * len(ordered)) - 1)]


def _losses(evidence: Evidence) -> list[tuple[int, float]]:
    """Every step's loss from rank 0's heartbeat, or the logged rows when the heartbeat was rotated away."""
    from_beats = [(beat.step, beat.loss) for beat in evidence.step_ends.get(0, []) if beat.loss is not None]
    from_rows = [(row.step, row.loss) for row in evidence.training]
    reaches_back = from_beats and (not from_rows or from_beats[0][0] <= from_rows[0][0])
    return from_beats if reaches_back else from_rows


def _step_times(ends: list[Heartbeat]) -> list[float]:
    return [beat.dt_step_s for beat in ends[WARM_UP_STEPS:] if beat.dt_step_s is not None]


def _end(evidence: Evidence) -> float | None:
    return evidence.last_beat.ts if evidence.last_beat else None
