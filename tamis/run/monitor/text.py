"""The monitor as plain lines, panel by panel: for --once and for the panels of the live screen."""

from __future__ import annotations

import math

from tamis.run.cost import Spent, money
from tamis.run.eta import duration_text
from tamis.run.files.console import counted, printable_line
from tamis.run.files.hardware import FAULTS, Gpu, GpuSpeed
from tamis.run.files.records import utc
from tamis.run.monitor.ranks import RankView
from tamis.run.monitor.snapshot import GateView, Snapshot

BAR_WIDTH = 20
EQUAL_GATES_NATS = math.log(3)
SHOWN_CHECKPOINTS = 6
ENDED = ("done", "halted", "crashed", "failed")


def snapshot_text(snapshot: Snapshot) -> str:
    """All panels in order; empty ones are left out."""
    panels = panel_lines(snapshot)
    blocks = [[f"-- {title}", *lines] if title else lines for title, lines in panels.items() if lines]
    return "\n".join(printable_line(line) for block in blocks for line in block)


def panel_lines(snapshot: Snapshot) -> dict[str, list[str]]:
    """Title → lines, also for the web page."""
    return {
        "": status_lines(snapshot),
        "step time": time_lines(snapshot),
        "ranks": rank_lines(snapshot),
        "GPUs": gpu_lines(snapshot),
        "gates by layer": gate_lines(snapshot),
        "checkpoints": checkpoint_lines(snapshot),
        "samples": continuation_lines(snapshot),
        "events": event_lines(snapshot),
        "alerts": alert_lines(snapshot),
    }


def status_lines(snapshot: Snapshot) -> list[str]:
    where = f"{snapshot.run_dir}  at {snapshot.taken_at}"
    if snapshot.launch_phase is not None:
        where = f"launch phase {snapshot.launch_phase} of 3 in {where}"
    lines = [f"{snapshot.state.upper()}  {snapshot.headline}", where]
    if snapshot.model:
        count = f"{snapshot.parameters / 1e6:.1f}M parameters" if snapshot.parameters else "size unknown"
        processes = counted(snapshot.processes, "process") if snapshot.processes else "processes unknown"
        lines.append(f"{snapshot.model}, {count}, {snapshot.dataset}, {processes}")
    if snapshot.steps:
        lines.append(progress_line(snapshot))
    if snapshot.loss is not None:
        lines += [_loss_line(snapshot), _speed_line(snapshot)]
    if snapshot.cost is not None:
        lines.append(cost_line(snapshot, snapshot.cost))
    return lines


def cost_line(snapshot: Snapshot, spent: Spent) -> str:
    """What the launches have cost; what the whole run will cost while it runs, and what the machine costs after it."""
    line, eta_s = f"cost {spent} so far", snapshot.progress.eta_s
    if spent.per_hour and eta_s is not None:
        line += f", about {money(spent.cost + eta_s / 3600 * spent.per_hour)} in all"
    if spent.per_hour and snapshot.state in ENDED:
        idle_s = min((rank.age_s for rank in snapshot.ranks), default=0.0)
        since = money(idle_s / 3600 * spent.per_hour)
        line += f"; ended {duration_text(idle_s)} ago: {since} more if the machine still runs"
    return line


def progress_line(snapshot: Snapshot) -> str:
    share = snapshot.step / snapshot.steps if snapshot.steps else 0.0
    line = f"{bar(share)} step {snapshot.step:,}/{snapshot.steps:,} ({share:.1%})"
    done, planned = snapshot.progress.tokens_done, snapshot.progress.tokens_planned
    if done is not None and planned is not None:
        line += f"  {quantity(done)}/{quantity(planned)} tokens"
    if snapshot.state == "running":
        line += f"  ETA {duration_text(snapshot.progress.eta_s)}"
    return line


def time_lines(snapshot: Snapshot) -> list[str]:
    times = snapshot.times
    if times.step_s is None:
        return []
    line = f"step {seconds(times.step_s)} = fetch {seconds(times.fetch_s)} + compute {seconds(times.compute_s)}"
    lines = [line]
    if times.fetch_p50_s is not None:
        lines.append(f"fetch p50 {seconds(times.fetch_p50_s)}, p95 {seconds(times.fetch_p95_s)}")
    if snapshot.progress.tokens_per_s is not None:
        lines.append(f"{snapshot.progress.tokens_per_s:,.0f} tok/s, evaluations and saves included")
    return lines


def rank_lines(snapshot: Snapshot) -> list[str]:
    """One line per rank. The pid, needed for kill -USR1, comes early because a narrow panel cuts the end."""
    if not snapshot.ranks:
        return []
    return ["rank     pid   step   age phase              GiB", *map(_rank_line, snapshot.ranks)]


def gpu_lines(snapshot: Snapshot) -> list[str]:
    return [_gpu_line(gpu) for gpu in snapshot.gpus]


def gate_lines(snapshot: Snapshot) -> list[str]:
    """Shares of the three branches and their entropy, which starts at ln 3; then selection health, where measured."""
    if not snapshot.gates:
        return []
    has_selection = any(gate.distinct is not None for gate in snapshot.gates)
    lines = ["layer  cmp   sel   win   entropy" + ("  dist  back  like" if has_selection else "")]
    lines += [_gate_line(gate, has_selection) for gate in snapshot.gates]
    if snapshot.gate_entropy_mean is not None:
        collapse = snapshot.gate_collapse_fraction
        lines.append(f"mean {snapshot.gate_entropy_mean:.3f} of ln 3 = {EQUAL_GATES_NATS:.3f}")
        lines += [] if collapse is None else [f"collapsed heads {collapse:.1%}"]
    return [*lines, "selection: distinct blocks, how far back, likeness"] if has_selection else lines


def _gate_line(gate: GateView, has_selection: bool) -> str:
    entropy = "     " if gate.entropy is None else f"{gate.entropy:.3f}"
    if has_selection:
        figures = (gate.distinct, gate.distance, gate.likeness)
        entropy += "  " + "".join("     -" if figure is None else f"{figure:6.2f}" for figure in figures)
    elif gate.entropy is not None:
        entropy += f" {bar(gate.entropy / EQUAL_GATES_NATS, 5)}"
    return f"{gate.layer:5d}  {gate.compressed:.2f}  {gate.selected:.2f}  {gate.window:.2f}  {entropy}"


def checkpoint_lines(snapshot: Snapshot) -> list[str]:
    shown = snapshot.checkpoints[-SHOWN_CHECKPOINTS:]
    times = [saved.time[5:16].replace("T", " ") for saved in shown]  # month to minute
    lines = [f"step {one.step:<7} {one.mib:8,.1f} MiB  {time}" for one, time in zip(shown, times, strict=True)][::-1]
    return [*_copies_lines(snapshot), *lines]


def _copies_lines(snapshot: Snapshot) -> list[str]:
    copies = snapshot.copies
    if copies is None:
        return []
    done = "nothing yet" if copies.newest_step is None else f"step {copies.newest_step}"
    ago = "" if copies.age_s is None else f", {age(copies.age_s)} ago"
    now = "" if copies.copying_step is None else f"; copying step {copies.copying_step}"
    return [f"copied: {done}{ago}{now}"]


def continuation_lines(snapshot: Snapshot) -> list[str]:
    """How the model continued held-out openings at the last evaluation; a bar divides the two."""
    return [f"step {sample.step}: {sample.prompt} | {sample.text}" for sample in snapshot.samples]


def event_lines(snapshot: Snapshot) -> list[str]:
    return [
        f"{utc(event['ts'])[11:19]} {event.get('by')} {event.get('event')}: {event.get('reason')}"
        for event in snapshot.events
    ]


def newest_events_first(snapshot: Snapshot) -> list[str]:
    """Event lines in reverse, for a panel too small for all."""
    return event_lines(snapshot)[::-1]


def alert_lines(snapshot: Snapshot) -> list[str]:
    return [f"{'!!' if alert.level == 'problem' else ' i'} {alert.text}" for alert in snapshot.alerts]


def bar(share: float, width: int = BAR_WIDTH) -> str:
    filled = round(min(1.0, max(0.0, share)) * width)
    return "█" * filled + "░" * (width - filled)


def quantity(count: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.2f}{letter}"
    return f"{count:.0f}"


def seconds(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def age(value: float) -> str:
    return f"{value:.0f} s" if value < 1000 else duration_text(value)


def _loss_line(snapshot: Snapshot) -> str:
    parts = [f"loss {snapshot.loss:.4f}"]
    if snapshot.validation:
        last = snapshot.validation[-1]
        parts.append(f"validation {last.loss:.4f} (perplexity {last.ppl:,.1f}) at step {last.step}")
    return "  ".join(parts)


def _speed_line(snapshot: Snapshot) -> str:
    parts = [] if snapshot.toks_per_s is None else [f"{snapshot.toks_per_s:,.0f} tok/s"]
    parts.append("MFU not measured" if snapshot.mfu is None else f"MFU {snapshot.mfu:.1%}")
    if snapshot.lr is not None:
        parts.append(f"lr {snapshot.lr:.2e}")
    if snapshot.grad_norm is not None:
        parts.append(f"gradient norm {snapshot.grad_norm:.2f}")
    return "  ".join(parts)


def _rank_line(view: RankView) -> str:
    memory = "-" if view.is_alive else "gone"
    if view.is_alive and view.mem_alloc_gib is not None and view.mem_reserved_gib is not None:
        memory = f"{view.mem_alloc_gib:.1f}/{view.mem_reserved_gib:.1f}"
    return f"{view.rank:4d} {view.pid:7d} {view.step:6d} {age(view.age_s):>5} {view.phase:<12} {memory:>9}"


def _gpu_line(gpu: Gpu) -> str:
    busy = "busy ?" if gpu.utilisation_percent is None else f"busy {gpu.utilisation_percent:3d}%"
    memory = f"{gpu.used_mib / 1024:.1f}/{gpu.total_mib / 1024:.1f} GiB"
    faults = [cause for cause in gpu.speed.slowed_by if cause in FAULTS]  # early: a narrow screen cuts the end
    slowed = [f"slowed by {', '.join(faults)}"] if faults else []
    return "  ".join([f"GPU {gpu.index}", busy, *slowed, memory, *_speed_words(gpu.speed), gpu.name])


def _speed_words(speed: GpuSpeed) -> list[str]:
    clock, power, heat = speed.clock_mhz, speed.power_w, speed.temperature_c
    words = [] if heat is None else [f"{heat} °C"]
    words += [] if clock is None else [_out_of(clock, speed.top_clock_mhz, "MHz")]
    words += [] if power is None else [_out_of(power, speed.power_limit_w, "W")]
    return words


def _out_of(value: int, most: int | None, unit: str) -> str:
    return f"{value:,} {unit}" if most is None else f"{value:,}/{most:,} {unit}"
