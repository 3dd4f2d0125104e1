"""`tamis bench needle`: trains a small NSA model to find facts far beyond its window, then ablates each branch.

The task hides facts in a long filler and asks for them at the end. A fact is one token that joins a key and a value; a
question is a key, and its answer the value. The facts are adjacent: a mean over their block shows that they are there
but mixes their values, so the answer must be read from the token itself. The filler follows a local rule (each token is
determined by the one two before it), which is work for short-range attention.

Measures accuracy by depth and length, and with each branch removed: its gate shut, or, for the scores, every compressed
key zeroed, so that nothing guides the selection. The miniature takes seconds on a CPU. Prints tables, then JSON.
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

from tamis.attention.layer import NSAAttention
from tamis.config import Config, build_config
from tamis.model import Decoder

KEYS, VALUES, FILLERS = 8, 8, 16
FIRST_FACT = FILLERS
FIRST_QUESTION = FIRST_FACT + KEYS * VALUES
FIRST_ANSWER = FIRST_QUESTION + KEYS
RESTART = 12  # tokens after which the filler restarts: nothing far away helps to predict it
ECHO = 2  # the filler's rule: one more than the token this far back

BRANCHES = ("compressed", "selected", "window")
ABLATIONS = (*BRANCHES, "scores")
DEPTHS = 5  # bins from the first token to the last one beyond the window
LOCAL_WEIGHT = 0.1  # of the filler's loss: the rule is easy and would dominate the facts
EMBEDDING_SCALE, MATRIX_SCALE = 20.0, 2.0  # a tiny model at the usual scale needs several times the steps


@dataclass(frozen=True)
class NeedleSettings:
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
    rope_base: float = 10000.0
    growing: bool = False  # lengths from the shortest to the longest; else they take turns
    tokens: int = 1 << 19  # most tokens in a batch
    shown: tuple[int, ...] = ()  # lengths measured; empty: those trained on
    examples: int = 256  # fresh texts of each length measured

    @property
    def measured(self) -> tuple[int, ...]:
        return self.shown or self.lengths

    def sequences(self, length: int) -> int:
        return max(1, min(self.batch, self.tokens // length))

    def length_of(self, step: int) -> int:
        if not self.growing:
            return self.lengths[step % len(self.lengths)]
        # Alternate the longest so far and the one before it; the longest of all is reached half way.
        reached = min(len(self.lengths) - 1, 2 * step * len(self.lengths) // self.steps)
        return self.lengths[max(0, reached - step % 2)]

    def config(self) -> Config:
        model = {"name": "needle", "dim": self.dim, "n_layers": self.layers, "n_heads": self.heads, "d_k": self.d_k,
                 "n_kv_groups": self.groups, "d_ff": 2 * self.dim, "rope_base": self.rope_base}  # fmt: skip
        nsa = {"l": self.l, "d": self.d, "l_sel": self.l_sel, "n_sel": self.n_sel, "w": self.w, "phi": self.phi}
        train = {"seq_len": max(self.lengths + self.shown), "aux_stats": False}
        return build_config({"model": model, "nsa": nsa, "data": {"tokenizer": "byte"}, "train": train})


# For a GPU: a window of 16 tokens, facts up to 65,536 tokens away, four times farther than any in training. With this
# base most angles hardly change over such a distance, so a key matches at any distance.
LARGE = NeedleSettings(
    lengths=(128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    shown=(512, 2048, 8192, 16384, 32768, 65536),
    growing=True,
    steps=2000,
    batch=64,
    tokens=1 << 15,
    dim=64,
    d_k=32,
    l=16,
    d=8,
    l_sel=16,
    n_sel=8,
    w=16,
    lr=5e-3,
    rope_base=1e8,
    examples=48,
)


@dataclass(frozen=True)
class Needles:
    """Tokens `[B,L]`, the position of each question, the depth of its fact (0 first, 1 last possible), its answer."""

    tokens: Tensor
    questions_BQ: Tensor
    depths_BQ: Tensor
    answers_BQ: Tensor
    predictable_BL: Tensor  # positions whose next token follows from the filler's rule


def make_needles(batch: int, length: int, window: int, questions: int, generator: torch.Generator) -> Needles:
    """Hide one fact for each question, with its own key, more than `window` tokens before the questions."""
    tail = 2 * questions
    reach = length - tail - window
    if reach < questions:
        raise ValueError(f"{length} tokens leave no room for {questions} facts beyond a window of {window}")
    tokens, predictable = _filler(batch, length, generator)
    first = torch.randint(reach - questions + 1, (batch, 1), generator=generator)
    positions = first + torch.stack([torch.randperm(questions, generator=generator) for _ in range(batch)])
    keys = torch.stack([torch.randperm(KEYS, generator=generator)[:questions] for _ in range(batch)])
    values = torch.randint(VALUES, (batch, questions), generator=generator)
    tokens.scatter_(1, positions, FIRST_FACT + keys * VALUES + values)
    at = length - tail + 2 * torch.arange(questions).expand(batch, -1)
    tokens.scatter_(1, at, FIRST_QUESTION + keys)
    tokens.scatter_(1, at + 1, FIRST_ANSWER + values)
    is_filler = tokens < FILLERS
    # A token is predictable if it, the one it echoes and the one before it are filler.
    known = predictable & is_filler
    known[:, ECHO:] &= is_filler[:, :-ECHO]
    predictable_next = torch.zeros_like(known)
    predictable_next[:, :-1] = known[:, 1:]
    return Needles(tokens, at, positions / max(1, reach - 1), FIRST_ANSWER + values, predictable_next)


def _filler(batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return runs of RESTART tokens, each begun by ECHO random ones, and which tokens the rule determines."""
    runs = -(-length // RESTART)
    seeds = torch.randint(FILLERS, (batch, runs, ECHO), generator=generator)
    step = torch.arange(RESTART)
    tokens = (seeds[:, :, step % ECHO] + step // ECHO) % FILLERS
    ruled = (step >= ECHO).expand(batch, runs, RESTART)
    return tokens.flatten(1)[:, :length].contiguous(), ruled.flatten(1)[:, :length].contiguous()


def measure_needle(
    setting: NeedleSettings | None = None, *, device: str = "cpu", out_dir: str | Path = "artifacts/bench"
) -> dict[str, Any]:
    """Train, then measure on fresh sequences; write needle.json and print tables and the same document."""
    setting, place = setting or NeedleSettings(), torch.device(device)
    started = time.perf_counter()
    model = train_needle(setting, place)
    trained_s = time.perf_counter() - started
    print(f"trained {setting.steps} steps on lengths {list(setting.lengths)} in {trained_s:.1f} s; window {setting.w}")
    by_length = {length: accuracy_by_depth(model, setting, length, setting.examples) for length in setting.measured}
    _print_depths(by_length)
    ablations = {"nothing": _by_length(model, setting)}
    for what in ABLATIONS:
        with ablated(model, what):
            ablations[what] = _by_length(model, setting)
    _print_ablations(ablations)
    document = {"bench": "needle", "setting": asdict(setting), "chance": 1 / VALUES, "trained_s": round(trained_s, 1),
                "accuracy_by_depth": by_length, "ablations": ablations}  # fmt: skip
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "needle.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document))
    return document


def train_needle(setting: NeedleSettings, device: torch.device) -> Decoder:
    """Train a model from scratch."""
    torch.manual_seed(setting.seed)
    model = Decoder(setting.config())
    _widen(model)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.lr, betas=(0.9, 0.98), weight_decay=0.0)
    generator = torch.Generator().manual_seed(setting.seed)
    for step in range(setting.steps):
        for group in optimizer.param_groups:
            group["lr"] = setting.lr * min(1.0, (step + 1) / 20) * (1.0 - 0.9 * step / setting.steps)
        length = setting.length_of(step)
        needles = make_needles(setting.sequences(length), length, setting.w, setting.questions, generator)
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
    """Return logits of the answers `[B,Q,V]`, logits of the filler's predictable tokens, and those tokens."""
    tokens = needles.tokens.to(device)
    hidden, _ = model(tokens)
    rows = torch.arange(len(tokens), device=device)[:, None]
    answers = model.logits(hidden[rows, needles.questions_BQ.to(device)])
    at = needles.predictable_BL.to(device).nonzero(as_tuple=True)
    return answers, model.logits(hidden[at]), tokens.roll(-1, dims=1)[at]


@torch.no_grad()
def accuracies(model: Decoder, setting: NeedleSettings, length: int, examples: int) -> dict[str, float]:
    """Return the shares of facts found and of filler tokens predicted."""
    found_NQ, predicted, _ = _measure(model, setting, length, examples)
    return {"facts": round(found_NQ.mean().item(), 4), "filler": round(predicted, 4)}


def _by_length(model: Decoder, setting: NeedleSettings) -> dict[int, dict[str, float]]:
    return {length: accuracies(model, setting, length, setting.examples) for length in setting.measured}


@torch.no_grad()
def accuracy_by_depth(model: Decoder, setting: NeedleSettings, length: int, examples: int) -> list[float | None]:
    """Return the share of facts found in each of DEPTHS parts of the reach, oldest first; None if it held no fact."""
    found_NQ, _, depths_NQ = _measure(model, setting, length, examples)
    part = (depths_NQ * DEPTHS).long().clamp_max(DEPTHS - 1)
    parts = [found_NQ[part == i] for i in range(DEPTHS)]
    return [round(found.mean().item(), 4) if len(found) else None for found in parts]


def _measure(model: Decoder, setting: NeedleSettings, length: int, examples: int) -> tuple[Tensor, float, Tensor]:
    """Return which facts were found, the share of the filler predicted, and the facts' depths, over fresh sequences.

    The sequences come from another seed than training's, the same for every measurement.
    """
    generator = torch.Generator().manual_seed(setting.seed + 1_000_003)
    at_once = max(1, setting.tokens // length)
    found, depths, predicted, fillers = [], [], 0, 0
    for first in range(0, examples, at_once):
        needles = make_needles(min(at_once, examples - first), length, setting.w, setting.questions, generator)
        answers, following, expected = _predict(model, needles, model.embedding.weight.device)
        found.append((answers.argmax(-1).cpu() == needles.answers_BQ).float())
        depths.append(needles.depths_BQ)
        predicted += int((following.argmax(-1) == expected).sum())
        fillers += len(expected)
    return torch.cat(found), predicted / fillers, torch.cat(depths)


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

    def without_keys(k_BSGD: Tensor, v_BSGD: Tensor, first_block: int = 0) -> tuple[Tensor, Tensor]:
        k, v = compress(k_BSGD, v_BSGD, first_block)
        return torch.zeros_like(k), v

    return without_keys


def _print_depths(by_length: dict[int, list[float | None]]) -> None:
    print("facts found, by depth (first column: the start of the text)")
    for length, found in by_length.items():
        print(f"{length:8d}" + "".join(f"{'–':>8}" if share is None else f"{share:8.2f}" for share in found))


def _print_ablations(ablations: dict[str, dict[int, dict[str, float]]]) -> None:
    print(f"facts found without a part, by length (chance: {1 / VALUES:.2f}); last column: filler predicted")
    lengths = list(ablations["nothing"])
    print(f"{'without':12}" + "".join(f"{length:8d}" for length in lengths) + f"{'filler':>8}")
    for what, by_length in ablations.items():
        facts = "".join(f"{by_length[length]['facts']:8.2f}" for length in lengths)
        print(f"{what:12}{facts}{by_length[lengths[-1]]['filler']:8.2f}")
