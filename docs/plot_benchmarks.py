"""Draw the plots of the pages: docs/data/*.json, as the benches print it, and a run's CSV files, to docs/images/*.svg.

    python docs/plot_benchmarks.py

Each plot is a card with a background of its own, so that it is readable on a light and on a dark page.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA, IMAGES = ROOT / "docs" / "data", ROOT / "docs" / "images"
WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 76, 560, 58, 346  # the plotting area; line labels stand to its right
TAMIS, DENSE, OTHER, SHORT = "#1f7a8c", "#d1495b", "#8d6a9f", "#7aa95c"
STYLE = """<style>
.card { fill: #ffffff; stroke: #d0d7de } .text { fill: #1f2328 } .faint { fill: #656d76 } .grid { stroke: #e6e8eb }
@media (prefers-color-scheme: dark) {
.card { fill: #161b22; stroke: #30363d } .text { fill: #e6edf3 } .faint { fill: #9198a1 } .grid { stroke: #2d333b } }
</style>"""


@dataclass(frozen=True)
class Line:
    """One measured series: x, y pairs with a label at the last one."""

    label: str
    color: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Plot:
    title: str
    subtitle: str
    x_name: str
    lines: Sequence[Line]
    y_ticks: Sequence[float]
    log_y: bool = True
    x_ticks: Sequence[float] | None = None  # None: every measured x

    def svg(self) -> str:
        xs = sorted({x for line in self.lines for x, _ in line.points})
        to_x = _scale(math.log2(xs[0]), math.log2(xs[-1]), LEFT + 12, RIGHT - 12)
        to_y = _scale(self._height(self.y_ticks[0]), self._height(self.y_ticks[-1]), BOTTOM, TOP)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
            STYLE,
            f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
            _text(16, 26, self.title, size=16),
            _text(16, 44, self.subtitle, faint=True, size=12),
        ]
        for tick in self.y_ticks:
            y = to_y(self._height(tick))
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>')
            parts.append(_text(LEFT - 8, y + 4, _short(tick), anchor="end", faint=True))
        for x in xs if self.x_ticks is None else self.x_ticks:
            parts.append(_text(to_x(math.log2(x)), BOTTOM + 20, _short(x), anchor="middle", faint=True))
        parts.append(_text((LEFT + RIGHT) / 2, BOTTOM + 42, self.x_name, anchor="middle", faint=True))
        for line, label_y in zip(self.lines, self._label_heights(to_y), strict=True):
            places = [(to_x(math.log2(x)), to_y(self._height(y))) for x, y in line.points]
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            parts.append(f'<path d="M{path}" fill="none" stroke="{line.color}" stroke-width="2.5"/>')
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{line.color}"/>' for x, y in places]
            parts.append(f'<path d="M{RIGHT + 8} {label_y - 4:.1f}h14" stroke="{line.color}" stroke-width="4"/>')
            parts.append(_text(RIGHT + 28, label_y, line.label))
        return "\n".join([*parts, "</svg>", ""])

    def _height(self, value: float) -> float:
        return math.log10(value) if self.log_y else value

    def _label_heights(self, to_y: Callable[[float], float]) -> list[float]:
        """Return a height for each line's label: at its last point, and at least 18 units from the next."""
        wanted = {i: to_y(self._height(line.points[-1][1])) + 4 for i, line in enumerate(self.lines)}
        lowest = -math.inf
        for i in sorted(wanted, key=wanted.__getitem__):
            wanted[i] = lowest = max(wanted[i], lowest + 18)
        return [wanted[i] for i in range(len(self.lines))]


def _scale(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    return lambda value: first + (value - low) / (high - low) * (last - first)


def _text(x: float, y: float, text: str, *, anchor: str = "start", faint: bool = False, size: int = 13) -> str:
    name = "faint" if faint else "text"
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{text}</text>'


def _short(value: float) -> str:
    if value >= 1024 and value % 1024 == 0:
        return f"{value // 1024:.0f}k"
    return f"{value / 1000:.0f},000" if value >= 1000 else f"{value:g}"


def attention_plot(document: dict[str, Any]) -> Plot:
    peers = json.loads((DATA / "attention.json").read_text(encoding="utf-8"))  # the run with other implementations

    def line(label: str, color: str, name: str, measured: dict[str, Any] = document) -> Line:
        rows = [
            r for r in measured["rows"] if r["shape"] == "m7c" and r["name"] == name and r["choices"] in ("", "random")
        ]
        return Line(label, color, [(r["length"], r["both_ms"]) for r in rows])

    return Plot(
        "Attention, forward + backward, ms (lower is better)",
        f"{_machine(document)}; 12 heads, 2 KV heads, dim 64; {document['tokens']:,} tokens per call",
        "sequence length",
        [
            line("dense, cuDNN", DENSE, "dense, cudnn"),
            line("best other NSA", OTHER, "other NSA", peers),
            line("Tamis", TAMIS, "whole"),
        ],
        (1, 2, 5, 10, 20, 50, 100),
    )


def training_plot(document: dict[str, Any]) -> Plot:
    def line(label: str, color: str, attention: str) -> Line:
        rows = [r for r in document["rows"] if r["attention"] == attention and "layers" not in r]
        return Line(label, color, [(r["length"], r["toks_per_s"]) for r in rows])

    return Plot(
        "Training of M7C (125M), tokens per second (higher is better)",
        f"{_machine(document)}; {document['tokens_per_step']:,} tokens per step",
        "sequence length",
        [line("NSA", TAMIS, "nsa"), line("dense twin", DENSE, "dense")],
        (0, 100_000, 200_000, 300_000, 400_000, 500_000, 600_000),
        log_y=False,
    )


def decode_plot(document: dict[str, Any]) -> Plot:
    def line(label: str, color: str, column: str, length: int) -> Line:
        return Line(label, color, [(r["batch"], r[column]) for r in document["rows"] if r["length"] == length])

    return Plot(
        "Decoding one token, attention of one layer, ms (lower is better)",
        f"{_machine(document)}; 12 heads, 2 KV heads, dim 64; CUDA graph, cold caches",
        "sequences in the batch",
        [
            line("dense, 64k cache", DENSE, "dense_ms", 65536),
            line("NSA, 64k cache", TAMIS, "nsa_ms", 65536),
            line("dense, 8k cache", OTHER, "dense_ms", 8192),
            line("NSA, 8k cache", SHORT, "nsa_ms", 8192),
        ],
        (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1),
    )


def production_plot() -> Plot:
    def line(label: str, color: str, file: str) -> Line:
        with open(DATA / "production_run" / file, encoding="utf-8") as rows:
            points = [(float(row["step"]), float(row["loss"])) for row in csv.DictReader(rows)]
        return Line(label, color, [(step, loss) for step, loss in points if step % 1000 == 0])

    return Plot(
        "The production run: loss by step",
        "NVIDIA H200, bf16, torch 2.11.0, 2026-11-16; 2,048 tokens per step",
        "step",
        [line("one training batch", OTHER, "training.csv"), line("held-out text", TAMIS, "val.csv")],
        (3, 4, 5, 6, 7),
        log_y=False,
        x_ticks=(5000, 10000, 20000, 30000, 40000, 50000),
    )


def proof_plot() -> Plot:
    def line(label: str, color: str, run: str) -> Line:
        with open(DATA / "proof" / run / "val.csv", encoding="utf-8") as rows:
            return Line(label, color, [(int(r["step"]) * 65_536 / 1e6, float(r["loss"])) for r in csv.DictReader(rows)])

    return Plot(
        "NSA and its dense twin: loss on held-out text by tokens",
        "NVIDIA H200, bf16, 2026-11-16; English Wikipedia, packed documents, seed 2",
        "million training tokens",
        [
            line("dense, 16k", OTHER, "dense_16384_seed2"),
            line("dense, 2k", DENSE, "dense_2048_seed2"),
            line("NSA, 16k", SHORT, "nsa_16384_seed2"),
            line("NSA, 2k", TAMIS, "nsa_2048_seed2"),
        ],
        (4.5, 5, 5.5, 6, 6.5),
        log_y=False,
        x_ticks=(4, 8, 12, 16),
    )


def _machine(document: dict[str, Any]) -> str:
    return f"{document['device']}, bf16, torch {document['torch'].split('+')[0]}, {document['date']}"


PLOTS: dict[str, tuple[str, Callable[[dict[str, Any]], Plot]]] = {
    "attention_latency.svg": ("attention_bench.json", attention_plot),
    "training_speed.svg": ("train.json", training_plot),
    "decode_latency.svg": ("decode.json", decode_plot),
}


def draw(folder: Path) -> None:
    """Write every plot into the folder."""
    for image, (source, plot) in PLOTS.items():
        document = json.loads((DATA / source).read_text(encoding="utf-8"))
        (folder / image).write_text(plot(document).svg(), encoding="utf-8")
    (folder / "production_run.svg").write_text(production_plot().svg(), encoding="utf-8")
    (folder / "proof.svg").write_text(proof_plot().svg(), encoding="utf-8")


if __name__ == "__main__":
    draw(IMAGES)
