"""`tamis bench needle`: trains a small NSA model and its dense twin on retrieval tasks, and measures both.

One model learns all tasks of `retrieval_tasks` at once, at lengths that grow. The twin has as many parameters and reads
the same texts in the same order. Accuracy is the share of questions whose answers are all right; each answer is
predicted after the right ones before it, so for a chain this is the share that greedy decoding gets right.

Measures accuracy by length and depth, and for NSA with each branch removed: its gate shut, or, for the scores, every
compressed key zeroed, so that nothing guides the selection. Prints tables, then JSON.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tamis.attention.layer import NSAAttention
from tamis.bench.document import begin_document
from tamis.bench.retrieval_tasks import RetrievalTask, RetrievalTexts, make_texts, retrieval_tasks, tokens_of_texts
from tamis.config import Config, build_config
from tamis.config.size import dense_twin, parameter_count
from tamis.generate.load import device_for
from tamis.model import Decoder
from tamis.run.files.console import say
from tamis.run.files.records import optional_write, write_json_atomic

BRANCHES = ("compressed", "selected", "window")
ABLATIONS = (*BRANCHES, "scores")
DEPTHS = 5  # bins from the first token to the last one beyond the window
EMBEDDING_SCALE, MATRIX_SCALE = 20.0, 2.0  # a tiny model at the usual scale needs several times the steps
OTHER_TEXTS = 1_000_003  # added to the seed: measured texts are not those of training


@dataclass(frozen=True)
class NeedleSettings:
    """Sizes of the tasks and the model; the defaults are the miniature."""

    lengths: tuple[int, ...] = (48, 96)  # trained on, shortest first
    steps: int = 600
    tokens: int = 2304  # in a batch; at least one text
    names: int = 8
    repeats: int = 1  # tokens of a fact
    grow: tuple[float, float] = (0.2, 0.6)  # shares of the steps at which texts begin to grow and are at their longest
    layers: int = 1
    dim: int = 32
    heads: int = 4
    groups: int = 2
    d_k: int = 16
    l: int = 8  # noqa: E741  as the configs name it
    d: int = 4
    l_sel: int = 8
    n_sel: int = 6  # all blocks of the shortest texts: what a fact means is learned first, then where it is
    w: int = 8
    phi: str = "avg"
    lr: float = 1e-2
    seed: int = 0
    rope_base: float = 1e8  # most angles hardly change over 65,536 tokens, so a key matches at any distance
    shown: tuple[int, ...] = ()  # lengths measured; empty: those trained on
    examples: int = 256  # questions of each task and length measured
    only: tuple[str, ...] = ()  # names of the tasks; empty: all

    @property
    def measured(self) -> tuple[int, ...]:
        return self.shown or self.lengths

    @property
    def tasks(self) -> tuple[RetrievalTask, ...]:
        known = {task.name: task for task in retrieval_tasks(self.names)}
        if unknown := [name for name in self.only if name not in known]:
            raise ValueError(f"--task {unknown[0]!r} is not one of {', '.join(known)}")
        return tuple(task for name, task in known.items() if not self.only or name in self.only)

    def texts(self, length: int) -> int:
        """Texts in a batch."""
        return max(1, self.tokens // length)

    def length_of(self, step: int) -> int:
        """Return the longest length reached at even steps, and at odd ones each length up to it in turn.

        Steps before the first share of `grow` have the shortest length; the longest is reached at the second.
        """
        begin, end = self.grow
        grown = (step / self.steps - begin) / (end - begin)
        reached = int(max(0.0, min(1.0, grown)) * (len(self.lengths) - 1))
        return self.lengths[reached if step % 2 == 0 else step // 2 % (reached + 1)]

    def config(self) -> Config:
        model = {"name": "needle", "dim": self.dim, "n_layers": self.layers, "n_heads": self.heads, "d_k": self.d_k,
                 "n_kv_groups": self.groups, "d_ff": 2 * self.dim, "rope_base": self.rope_base}  # fmt: skip
        nsa = {"l": self.l, "d": self.d, "l_sel": self.l_sel, "n_sel": self.n_sel, "w": self.w, "phi": self.phi}
        data = {"tokenizer": "generated", "vocab_size": tokens_of_texts(self.names)}
        train = {"seq_len": max(self.lengths + self.shown), "aux_stats": False}
        return build_config({"model": model, "nsa": nsa, "data": data, "train": train})


# For a GPU: a query reads 144 tokens, and a compressed key for every 4 of up to 65,536.
LARGE = NeedleSettings(
    lengths=(128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
    shown=(4096, 8192, 16384, 32768, 65536),
    steps=5000,
    tokens=1 << 15,
    names=16,
    repeats=4,  # one or two compressed blocks, as a needle of RULER, a sentence, is for the paper's blocks of 32
    grow=(0.05, 0.85),  # which block to read is learned between 512 and 4,096 tokens
    dim=128,
    d_k=32,
    l=4,
    d=4,
    l_sel=16,
    n_sel=8,  # half of the shortest texts: where a fact is must be learned from the first step on
    w=16,
    lr=4e-3,
)


def measure_needle(
    setting: NeedleSettings | None = None, *, device: str = "cpu", out_dir: str | Path = "artifacts/bench"
) -> dict[str, Any]:
    """Train NSA and its twin and measure them on fresh texts; write needle.json, print tables and the document."""
    setting, place = setting or NeedleSettings(), device_for(device)
    document = begin_document("needle", place) | {"setting": asdict(setting), "models": {}}
    folder = Path(out_dir)
    config = setting.config()
    for name, its_config in {"nsa": config, "dense": dense_twin(config)}.items():
        document["models"][name] = _train_and_measure(name, its_config, setting, place)
        with optional_write():
            folder.mkdir(parents=True, exist_ok=True)
            write_json_atomic(folder / "needle.json", document)
    _print_tables(document["models"], setting)
    print(json.dumps(document))
    return document


def _train_and_measure(name: str, config: Config, setting: NeedleSettings, device: torch.device) -> dict[str, Any]:
    started = time.perf_counter()
    model = train_needle(config, setting, device)
    trained_s = time.perf_counter() - started
    by_length = {length: measure_tasks(model, setting, length) for length in setting.measured}
    measured = {
        "parameters": parameter_count(config),
        "trained_s": round(trained_s, 1),
        "accuracy": {
            task: {length: by_length[length][task]["accuracy"] for length in by_length} for task in _names(setting)
        },
        "by_depth": {
            task: {length: by_length[length][task]["by_depth"] for length in by_length} for task in _names(setting)
        },
    }
    if name == "nsa":
        measured["ablations"] = measure_ablations(model, setting)
    say(f"{name}: trained in {trained_s:.1f} s, measured in {time.perf_counter() - started - trained_s:.1f} s")
    return measured


def train_needle(config: Config, setting: NeedleSettings, device: torch.device) -> Decoder:
    """Train a model from scratch; what it reads depends on the settings alone."""
    torch.manual_seed(setting.seed)
    model = Decoder(config)
    _widen(model)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.lr, betas=(0.9, 0.98), weight_decay=0.0)
    generator, order = torch.Generator(device).manual_seed(setting.seed), random.Random(setting.seed)
    for step in range(setting.steps):
        for group in optimizer.param_groups:
            group["lr"] = setting.lr * min(1.0, (step + 1) / 20) * (1.0 - step / setting.steps)
        loss = _loss(model, _batch(setting, setting.length_of(step), generator, order))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % max(1, setting.steps // 10) == 0:
            say(f"step {step + 1} of {setting.steps}, {setting.length_of(step):,} tokens, loss {loss.item():.3f}")
    return model.eval()


@torch.no_grad()
def _widen(model: Decoder) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            parameter.mul_(EMBEDDING_SCALE if name.startswith("embedding") else MATRIX_SCALE)


def _batch(
    setting: NeedleSettings, length: int, generator: torch.Generator, order: random.Random
) -> list[RetrievalTexts]:
    """Return texts of all tasks in equal numbers; tasks that the last texts belong to are drawn at random."""
    each, rest = divmod(setting.texts(length), len(setting.tasks))
    more = order.sample(setting.tasks, rest)
    counts = {task: each + (task in more) for task in setting.tasks}
    return [
        make_texts(task, n, length, setting.w, setting.names, generator, setting.repeats)
        for task, n in counts.items()
        if n
    ]


def _loss(model: Decoder, batch: list[RetrievalTexts]) -> Tensor:
    """Return the mean over the tasks of the cross-entropy of their answers."""
    of_tasks = []
    for texts, logits in zip(batch, _logits_of_answers(model, batch), strict=True):
        rows = torch.arange(len(texts.tokens_NL), device=logits.device)[:, None, None]
        answers = texts.tokens_NL[rows, texts.at_NQA + 1]
        of_tasks.append(F.cross_entropy(logits.flatten(0, 2).float(), answers.flatten()))
    return torch.stack(of_tasks).mean()


def _logits_of_answers(model: Decoder, batch: list[RetrievalTexts]) -> list[Tensor]:
    """Return the logits `[N,Q,A,V]` of the answers of each task."""
    tokens = torch.cat([texts.tokens_NL for texts in batch])
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        hidden, _ = model(tokens)
        of_tasks = hidden.split([len(texts.tokens_NL) for texts in batch])
        rows = [torch.arange(len(texts.tokens_NL), device=tokens.device)[:, None, None] for texts in batch]
        return [model.logits(h[r, texts.at_NQA]) for h, r, texts in zip(of_tasks, rows, batch, strict=True)]


@torch.no_grad()
def measure_tasks(
    model: Decoder, setting: NeedleSettings, length: int, examples: int | None = None
) -> dict[str, dict[str, Any]]:
    """Return accuracy by task and, answer by answer, by depth; the texts are the same for every measurement."""
    generator = torch.Generator(model.embedding.weight.device).manual_seed(setting.seed + OTHER_TEXTS)
    measured = {}
    for task in setting.tasks:
        is_right, depths = [], []
        for count in _pieces(-(-(examples or setting.examples) // task.questions), setting.texts(length)):
            texts = make_texts(task, count, length, setting.w, setting.names, generator, setting.repeats)
            predicted = _logits_of_answers(model, [texts])[0].argmax(-1)
            is_right.append((predicted[..., None] == texts.accepted_NQAA).any(-1))
            depths.append(texts.depths_NQA)
        right_NQA = torch.cat(is_right)
        accuracy = right_NQA.all(-1).float().mean().item()
        measured[task.name] = {"accuracy": round(accuracy, 4), "by_depth": _by_depth(right_NQA, torch.cat(depths))}
    return measured


def _pieces(total: int, most: int) -> Iterator[int]:
    for first in range(0, total, most):
        yield min(most, total - first)


def _by_depth(right_NQA: Tensor, depths_NQA: Tensor) -> list[float | None]:
    """Return the share of right answers in each of DEPTHS parts of the text, oldest first; None if it held no fact."""
    parts = [right_NQA[(depths_NQA * DEPTHS).floor().clamp_max(DEPTHS - 1) == i].float() for i in range(DEPTHS)]
    return [round(part.mean().item(), 4) if len(part) else None for part in parts]


def measure_ablations(model: Decoder, setting: NeedleSettings) -> dict[str, dict[str, float]]:
    """Return accuracy by task at the longest length measured, whole and without each part, from fewer questions."""
    ablations = {}
    for what in ("nothing", *ABLATIONS):
        with ablated(model, what) if what != "nothing" else contextlib.nullcontext():
            measured = measure_tasks(model, setting, max(setting.measured), setting.examples // 4)
        ablations[what] = {task: numbers["accuracy"] for task, numbers in measured.items()}
    return ablations


@contextlib.contextmanager
def ablated(model: Decoder, what: str) -> Iterator[None]:
    """Remove one branch's output, or make all scores equal, until the block ends."""
    layers = [module for module in model.modules() if isinstance(module, NSAAttention)]
    for layer in layers:
        if what == "scores":
            layer.compress = _without_keys(layer)  # type: ignore[method-assign]
        else:
            layer.gates = _shut(layer, BRANCHES.index(what))  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            delattr(layer, "compress" if what == "scores" else "gates")


def _shut(layer: NSAAttention, branch: int) -> Any:
    gates = layer.gates
    return lambda x_BSE: gates(x_BSE).index_fill(-1, torch.tensor(branch, device=x_BSE.device), 0.0)


def _without_keys(layer: NSAAttention) -> Any:
    compress = layer.compress

    def without_keys(kv: Tensor, first_block: int = 0) -> tuple[Tensor, Tensor]:
        k, v = compress(kv, first_block)
        return torch.zeros_like(k), v

    return without_keys


def _names(setting: NeedleSettings) -> list[str]:
    return [task.name for task in setting.tasks]


def _print_tables(models: dict[str, Any], setting: NeedleSettings) -> None:
    print("share of questions answered, by length")
    _print_row("task, model", [f"{length:,}" for length in setting.measured])
    for task in _names(setting):
        for name, model in models.items():
            _print_row(f"{task}, {name}", list(model["accuracy"][task].values()))
    longest = max(setting.measured)
    print(f"share of right answers at {longest:,} tokens, by depth (first column: the start of the text)")
    for task in _names(setting):
        for name, model in models.items():
            if any(share is not None for share in model["by_depth"][task][longest]):
                _print_row(f"{task}, {name}", model["by_depth"][task][longest])
    print(f"share of questions NSA answers at {longest:,} tokens, without a part")
    _print_row("without", _names(setting))
    for what, accuracy in models["nsa"]["ablations"].items():
        _print_row(what, list(accuracy.values()))


def _print_row(name: str, cells: Sequence[float | str | None]) -> None:
    shown = ["–" if cell is None else cell if isinstance(cell, str) else f"{cell:.2f}" for cell in cells]
    print(f"{name:20}" + "".join(f"{cell:>12}" for cell in shown))
