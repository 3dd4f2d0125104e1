"""`tamis bench needle`: trains a small NSA model to find facts far beyond its window, then shows what each branch does.

Accuracy by depth and length, and with each branch taken away: its gate shut, or for the scores, every compressed key
made alike, so that nothing guides the selection. Seconds on a CPU in miniature. Tables first, one JSON line last.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tamis.bench.needle_task import VALUES, Needles, make_needles
from tamis.config import Config, build_config
from tamis.model import Decoder
from tamis.model.nsa import NSALayer

BRANCHES = ("compressed", "selected", "window")
ABLATIONS = (*BRANCHES, "scores")
DEPTHS = 5  # bins from the first token to the last one beyond the window
LOCAL_WEIGHT = 0.1  # of the filler's loss: the rule is easy and would drown the facts
EMBEDDING_SCALE, MATRIX_SCALE = 20.0, 2.0  # a tiny model at the usual scale needs several times the steps


@dataclass(frozen=True)
class Setting:
    """Sizes of the task and the model; the defaults are the miniature."""

    lengths: tuple[int, ...] = (64, 128)
    steps: int = 800
    batch: int = 32
    questions: int = 4
    layers: int = 1
    dim: int = 32
    heads: int = 4
    groups: int = 2
    d_k: int = 16
    l: int = 8  # noqa: E741  as the configs name it
    d: int = 4
    l_sel: int = 8
    n_sel: int = 4
    w: int = 8
    phi: str = "avg"
    lr: float = 1e-2
    seed: int = 0

    def config(self) -> Config:
        model = {"name": "needle", "dim": self.dim, "n_layers": self.layers, "n_heads": self.heads,
                 "n_kv_groups": self.groups, "d_k": self.d_k, "d_ff": 2 * self.dim}  # fmt: skip
        nsa = {"l": self.l, "d": self.d, "l_sel": self.l_sel, "n_sel": self.n_sel, "w": self.w, "phi": self.phi}
        train = {"seq_len": max(self.lengths), "aux_stats": False}
        return build_config({"model": model, "nsa": nsa, "data": {"tokenizer": "byte"}, "train": train})


def bench_needle(
    setting: Setting | None = None, *, device: str = "cpu", examples: int = 256, out_dir: str | Path = "artifacts/bench"
) -> dict[str, Any]:
    """Train, then measure on fresh sequences; writes needle.json, prints tables and the same document."""
    setting, place = setting or Setting(), torch.device(device)
    started = time.perf_counter()
    model = train_needle(setting, place)
    trained_s = time.perf_counter() - started
    print(f"trained {setting.steps} steps on lengths {list(setting.lengths)} in {trained_s:.1f} s; window {setting.w}")
    by_length = {length: accuracy_by_depth(model, setting, length, examples) for length in setting.lengths}
    _tell_depths(by_length)
    ablations = {"nothing": accuracies(model, setting, max(setting.lengths), examples)}
    for what in ABLATIONS:
        with ablated(model, what):
            ablations[what] = accuracies(model, setting, max(setting.lengths), examples)
    _tell_ablations(ablations)
    document = {"bench": "needle", "setting": asdict(setting), "chance": 1 / VALUES, "trained_s": round(trained_s, 1),
                "accuracy_by_depth": by_length, "ablations": ablations}  # fmt: skip
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "needle.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document))
    return document


def train_needle(setting: Setting, device: torch.device) -> Decoder:
    """A model trained from scratch; the lengths take turns."""
    torch.manual_seed(setting.seed)
    model = Decoder(setting.config())
    _widen(model)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.lr, betas=(0.9, 0.98), weight_decay=0.0)
    generator = torch.Generator().manual_seed(setting.seed)
    for step in range(setting.steps):
        for group in optimizer.param_groups:
            group["lr"] = setting.lr * min(1.0, (step + 1) / 20) * (1.0 - 0.9 * step / setting.steps)
        length = setting.lengths[step % len(setting.lengths)]
        needles = make_needles(setting.batch, length, setting.w, setting.questions, generator)
        _loss(model, needles, device).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def _widen(model: Decoder) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            parameter.mul_(EMBEDDING_SCALE if name.startswith("embedding") else MATRIX_SCALE)


def _loss(model: Decoder, needles: Needles, device: torch.device) -> Tensor:
    answers, following, expected = _predict(model, needles, device)
    facts = F.cross_entropy(answers.flatten(0, 1), needles.answers_BQ.to(device).flatten())
    return facts + LOCAL_WEIGHT * F.cross_entropy(following, expected)


def _predict(model: Decoder, needles: Needles, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the answers `[B,Q,V]`; logits of the filler's predictable tokens, and these tokens."""
    tokens = needles.tokens.to(device)
    hidden, _ = model(tokens)
    rows = torch.arange(len(tokens), device=device)[:, None]
    answers = model.logits(hidden[rows, needles.questions_BQ.to(device)])
    at = needles.predictable_BL.to(device).nonzero(as_tuple=True)
    return answers, model.logits(hidden[at]), tokens.roll(-1, dims=1)[at]


@torch.no_grad()
def accuracies(model: Decoder, setting: Setting, length: int, examples: int) -> dict[str, float]:
    """Share of facts found, and of filler tokens foretold."""
    needles = _fresh(setting, length, examples)
    answers, following, expected = _predict(model, needles, model.embedding.weight.device)
    found = answers.argmax(-1).cpu() == needles.answers_BQ
    return {
        "facts": round(found.float().mean().item(), 4),
        "filler": round((following.argmax(-1) == expected).float().mean().item(), 4),
    }


@torch.no_grad()
def accuracy_by_depth(model: Decoder, setting: Setting, length: int, examples: int) -> list[float]:
    """Share of facts found in each of DEPTHS parts of the reach, the oldest first."""
    needles = _fresh(setting, length, examples)
    answers, _, _ = _predict(model, needles, model.embedding.weight.device)
    found = (answers.argmax(-1).cpu() == needles.answers_BQ).float()
    part = (needles.depths_BQ * DEPTHS).long().clamp_max(DEPTHS - 1)
    return [round(found[part == i].mean().item(), 4) for i in range(DEPTHS)]


def _fresh(setting: Setting, length: int, examples: int) -> Needles:
    """Sequences training has not drawn: another seed, the same for every measurement."""
    generator = torch.Generator().manual_seed(setting.seed + 1_000_003)
    return make_needles(examples, length, setting.w, setting.questions, generator)


@contextlib.contextmanager
def ablated(model: Decoder, what: str) -> Iterator[None]:
    """The model without one branch's output, or with scores that say nothing, until the block ends."""
    layers = [module for module in model.modules() if isinstance(module, NSALayer)]
    for layer in layers:
        if what == "scores":
            layer.compress = _alike(layer)  # type: ignore[method-assign]
        else:
            layer.gates = _shut(layer, BRANCHES.index(what))  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            delattr(layer, "compress" if what == "scores" else "gates")


def _shut(layer: NSALayer, branch: int) -> Any:
    gates = layer.gates
    return lambda x_BSE: gates(x_BSE).index_fill(-1, torch.tensor(branch, device=x_BSE.device), 0.0)


def _alike(layer: NSALayer) -> Any:
    compress = layer.compress

    def without_keys(k_BSGD: Tensor, v_BSGD: Tensor, first_block: int = 0) -> tuple[Tensor, Tensor]:
        k, v = compress(k_BSGD, v_BSGD, first_block)
        return torch.zeros_like(k), v

    return without_keys


def _tell_depths(by_length: dict[int, list[float]]) -> None:
    print("facts found, by depth (first column: the start of the text)")
    for length, found in by_length.items():
        print(f"{length:8d}" + "".join(f"{share:8.2f}" for share in found))


def _tell_ablations(ablations: dict[str, dict[str, float]]) -> None:
    print(f"{'without':12}{'facts':>8}{'filler':>8}   (chance for facts: {1 / VALUES:.2f})")
    for what, shares in ablations.items():
        print(f"{what:12}{shares['facts']:8.2f}{shares['filler']:8.2f}")
