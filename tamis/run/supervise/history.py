"""The history of a run that the rules read: each rank's last progress and step times, and rank 0's logged numbers.

Time here is the watchdog's own monotonic clock, counted only while the watchdog runs: neither a wall clock that jumps
nor a suspended machine makes a healthy run look silent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from statistics import median

from tamis.run.files.heartbeat import Heartbeat
from tamis.run.limits import LONGEST_TICK_S, STRETCH_S, STRETCH_STEPS

KEPT_STEPS = 500  # step times and logged beats remembered
FORMER_S = 60.0  # the ranks of one run begin within this time of each other
LOSS_WINDOW = 100  # logged losses whose median is the level of the loss


class RankHistory:
    """One rank: its last beat, the time of its last progress, its step times."""

    def __init__(self, rank: int, awake_s: float) -> None:
        self.rank = rank
        self.last: Heartbeat | None = None
        self.began: Heartbeat | None = None  # the first beat of the process that beats now
        self.progress_at = awake_s  # awake seconds at the last new (pid, step, phase, detail)
        self.dead_at: float | None = None  # awake seconds when its process was first found dead
        self.steps_by_this_process = 0
        self.step_times: deque[float] = deque(maxlen=KEPT_STEPS)
        self.recent: deque[Heartbeat] = deque(maxlen=KEPT_STEPS)  # step_end beats
        self.stretches: deque[float] = deque(maxlen=10_000)  # mean step time of each stretch, the whole run long
        self.stretches_of_this_process = 0
        self._stretch: list[float] = []
        self.first_step_s = 0.0  # how long this process's first step took, from its start to its end
        self.failed_save: Heartbeat | None = None  # until a later save succeeds
        self._step_started: Heartbeat | None = None
        self._step_ended: Heartbeat | None = None  # the last step_end, while nothing but steps followed it

    def add(self, beat: Heartbeat, awake_s: float) -> None:
        if self.began is None or beat.pid != self.began.pid:
            self.began = beat
            self.steps_by_this_process = self.stretches_of_this_process = 0
            self._stretch.clear()
            self._step_started = self._step_ended = None
        if self.last is None or _mark(beat) != _mark(self.last):  # a repeated beat is no progress
            self.progress_at = awake_s
        self._note_save(beat)
        self.last = beat
        if beat.phase == "step_end":
            self._end_step(beat)
        elif beat.phase == "step_start":
            self._step_started = self._step_started or beat
        elif beat.phase != "progress":
            self._step_ended = None  # an evaluation or a checkpoint is not part of a step's time

    def _note_save(self, beat: Heartbeat) -> None:
        """A save succeeded when the same process goes on after its `checkpoint` beat without a `save_error`."""
        if beat.save_error is not None:
            self.failed_save = beat
        elif self.last is not None and self.last.phase == "checkpoint" != beat.phase and beat.pid == self.last.pid:
            self.failed_save = self.failed_save if self.last.save_error is not None else None

    def _end_step(self, beat: Heartbeat) -> None:
        if self.steps_by_this_process == 0 and self._step_started is not None:
            self.first_step_s = beat.mono - self._step_started.mono
        self.steps_by_this_process += 1
        self.recent.append(beat)
        if self._step_ended is not None and beat.step > self._step_ended.step:
            seconds = max(0.0, beat.mono - self._step_ended.mono)
            self._add_step_time(seconds / (beat.step - self._step_ended.step))
        self._step_ended = beat

    def _add_step_time(self, seconds: float) -> None:
        self.step_times.append(seconds)
        self._stretch.append(seconds)
        if sum(self._stretch) >= STRETCH_S and len(self._stretch) >= STRETCH_STEPS:
            self.stretches.append(sum(self._stretch) / len(self._stretch))
            self.stretches_of_this_process += 1
            self._stretch.clear()

    @property
    def in_succession(self) -> bool:
        """True if the step under way follows another step; after an evaluation or a save, code may be compiled."""
        return self._step_ended is not None

    def typical(self, field: str, count: int) -> float | None:
        """Median of a field over the last `count` steps that have it; None while there are fewer."""
        values = [value for beat in self.recent if (value := getattr(beat, field)) is not None][-count:]
        return median(values) if len(values) == count else None


class RunHistory:
    """All ranks of one run, and rank 0's logged numbers."""

    def __init__(self, expected_ranks: int = 0) -> None:
        self.awake_s = 0.0
        self.ranks = {rank: RankHistory(rank, 0.0) for rank in range(expected_ranks)}
        self.logged: deque[Heartbeat] = deque(maxlen=KEPT_STEPS)  # beats of rank 0 that carry a loss
        self.gates_at_first: Heartbeat | None = None
        self.best_loss: float | None = None  # lowest `recent_loss` so far
        self._looked_at: float | None = None

    def tick(self, now: float) -> None:
        """Advance to a reading of the monotonic clock; call before adding the beats found at that moment."""
        if self._looked_at is not None:
            self.awake_s += min(max(0.0, now - self._looked_at), LONGEST_TICK_S)
        self._looked_at = now

    def add(self, beats: Iterable[Heartbeat]) -> None:
        for beat in beats:
            history = self.ranks.setdefault(beat.rank, RankHistory(beat.rank, self.awake_s))
            history.add(beat, self.awake_s)
            if beat.rank == 0 and beat.loss is not None:
                self._log(beat)

    def note_dead(self, ranks: Collection[int]) -> None:
        """Remember since when the processes of these ranks are dead; the others live."""
        for rank, history in self.ranks.items():
            if rank not in ranks:
                history.dead_at = None
            elif history.dead_at is None:
                history.dead_at = self.awake_s

    def restart(self, expected_ranks: int) -> None:
        """Reset for new processes: each gets the limits of a start, and higher ranks are dropped."""
        known = self.ranks
        self.ranks = {rank: known.get(rank) or RankHistory(rank, self.awake_s) for rank in range(expected_ranks)}
        for history in self.ranks.values():
            history.last, history.progress_at, history.steps_by_this_process = None, self.awake_s, 0
            history.stretches_of_this_process = 0

    def forget_former_ranks(self) -> None:
        """Drop ranks that fell silent before rank 0's process began: an earlier run here had more of them."""
        begun = self.ranks[0].began.ts - FORMER_S if 0 in self.ranks and self.ranks[0].began else 0.0
        self.ranks = {rank: r for rank, r in self.ranks.items() if r.last is None or r.last.ts >= begun}

    def silent_s(self, rank: int) -> float:
        return self.awake_s - self.ranks[rank].progress_at

    def _log(self, beat: Heartbeat) -> None:
        if self.logged and beat.step <= self.logged[-1].step:  # a resume repeats these steps
            self.logged = deque((old for old in self.logged if old.step < beat.step), maxlen=KEPT_STEPS)
        self.logged.append(beat)
        if self.gates_at_first is None and beat.gate_shares is not None:
            self.gates_at_first = beat
        loss = self.recent_loss()
        if loss is not None:
            self.best_loss = loss if self.best_loss is None else min(self.best_loss, loss)

    def recent_loss(self, window: int = LOSS_WINDOW) -> float | None:
        losses = [beat.loss for beat in list(self.logged)[-window:] if beat.loss is not None]
        return median(losses) if len(losses) == window else None


def _mark(beat: Heartbeat) -> tuple[int, int, str, str | None]:
    return beat.pid, beat.step, beat.phase, beat.detail
