"""Scores texts with a model: the log-probability of a text's last tokens, many texts at a time.

Texts are sorted by length and padded on the right, which a causal model cannot see. Logits are computed only where a
token is scored. Shapes: B texts, S tokens, N scored tokens of a batch, E width, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tamis.data.tokenizer import Tokenizer
from tamis.evaluate.tasks import Option, Task
from tamis.model import Decoder

LENGTH_MULTIPLE = {"cpu": 1, "cuda": 64}  # lengths are rounded up to this: few shapes to compile kernels for
TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 131072}
LOGITS_AT_ONCE = {"cpu": 1 << 25, "cuda": 1 << 28}  # numbers held at a time


@dataclass(frozen=True)
class ScoredText:
    """Token ids; those from `start` on are scored, each after all that come before it."""

    ids: list[int]
    start: int


@dataclass(frozen=True)
class Score:
    log_probability: float  # of the scored tokens together, in nats
    tokens: int
    is_greedy: bool  # each scored token is the likeliest


@dataclass(frozen=True)
class TaskResult:
    """Accuracies of one task. A choice is made by the mean over its tokens, the sum, or the sum per character."""

    examples: int
    shots: int
    accuracy: float  # by the mean; of a cloze task, the share continued exactly
    acc: float  # by the sum
    acc_norm: float  # by the sum per character
    chance: float

    @property
    def standard_error(self) -> float:
        return math.sqrt(self.accuracy * (1 - self.accuracy) / max(1, self.examples - 1))

    @property
    def centred(self) -> float:
        """0 for a guess, 1 for all right."""
        return (self.accuracy - self.chance) / (1 - self.chance)


def request_for(option: Option, tokenizer: Tokenizer, max_len: int) -> ScoredText:
    """Return the tokens of an option after end-of-text; the oldest are dropped where there are more than `max_len` + 1.

    White space between prompt and answer belongs to the answer, since a token begins with the space before its word.
    """
    prompt, whole = option.prompt.rstrip(), option.prompt + option.answer
    ids = [tokenizer.eot, *(int(i) for i in tokenizer.encode(whole))]
    start = min(1 + len(tokenizer.encode(prompt)), len(ids) - 1)
    surplus = max(0, len(ids) - max_len - 1)  # the last token is predicted, not read
    if surplus >= start:
        raise ValueError(f"an answer of {len(ids) - start} tokens does not fit {max_len}: raise --max-len")
    return ScoredText(ids[surplus:], start - surplus)


def score_task(
    model: Decoder, tokenizer: Tokenizer, task: Task, progress: Callable[[float], None] = lambda share: None
) -> tuple[TaskResult, list[int]]:
    """Return the accuracies of a task, and the option chosen for each example by the mean; −1: none is right."""
    options = [task.prompts(number) for number in range(len(task.examples))]
    try:
        requests = [[request_for(option, tokenizer, model.max_len) for option in each] for each in options]
    except ValueError as error:
        raise ValueError(f"task {task.name}: {error}") from None
    scores = iter(score(model, [request for each in requests for request in each], progress))
    chosen = [_choose(task, each, list(itertools.islice(scores, len(each)))) for each in options]
    golds = [example.gold for example in task.examples]
    by_mean, by_sum, by_character = (
        sum(option == gold for option, gold in zip(column, golds, strict=True)) / len(golds)
        for column in zip(*chosen, strict=True)
    )
    result = TaskResult(len(golds), task.shots, by_mean, by_sum, by_character, task.chance)
    return result, [choice[0] for choice in chosen]


def _choose(task: Task, options: Sequence[Option], scores: Sequence[Score]) -> tuple[int, int, int]:
    """Return the options chosen by the mean over tokens, by the sum, and by the sum per character."""
    if task.kind == "cloze":
        right = 0 if scores[0].is_greedy else -1
        return right, right, right
    sums = [s.log_probability for s in scores]
    means = [s.log_probability / s.tokens for s in scores]
    per_character = [s.log_probability / len(o.answer) for s, o in zip(scores, options, strict=True)]
    return means.index(max(means)), sums.index(max(sums)), per_character.index(max(per_character))


@torch.no_grad()
def score(
    model: Decoder, requests: Sequence[ScoredText], progress: Callable[[float], None] = lambda share: None
) -> list[Score]:
    """Return the score of each text, in their order; `progress` gets the share done after every batch."""
    order = sorted(range(len(requests)), key=lambda i: len(requests[i].ids), reverse=True)
    found: dict[int, Score] = {}
    for batch in _batches(order, requests, model.embedding.weight.device.type):
        found |= zip(batch, _score_batch(model, [requests[i] for i in batch]), strict=True)
        progress(len(found) / len(requests))
    return [found[i] for i in range(len(requests))]


def _batches(order: list[int], requests: Sequence[ScoredText], device: str) -> Iterator[list[int]]:
    """Cut the texts, longest first, into batches of about as many tokens, padding included, as the device takes."""
    while order:
        count = max(1, TOKENS_AT_ONCE[device] // _rounded(len(requests[order[0]].ids) - 1, device))
        yield order[:count]
        order = order[count:]


def _rounded(length: int, device: str) -> int:
    return math.ceil(length / LENGTH_MULTIPLE[device]) * LENGTH_MULTIPLE[device]


def _score_batch(model: Decoder, requests: Sequence[ScoredText]) -> list[Score]:
    device = model.embedding.weight.device
    length = min(_rounded(max(len(request.ids) for request in requests) - 1, device.type), model.max_len)
    inputs_BS = torch.zeros(len(requests), length, dtype=torch.long)
    for row, request in zip(inputs_BS, requests, strict=True):
        row[: len(request.ids) - 1] = torch.tensor(request.ids[:-1])
    hidden_BSE, _ = model(inputs_BS.to(device))
    counts = [len(request.ids) - request.start for request in requests]
    rows = torch.arange(len(requests)).repeat_interleave(torch.tensor(counts))
    columns = torch.cat([torch.arange(r.start - 1, len(r.ids) - 1) for r in requests])
    targets = torch.tensor([token for r in requests for token in r.ids[r.start :]])
    log_p, is_best = token_scores(model, hidden_BSE[rows.to(device), columns.to(device)], targets.to(device))
    pairs = zip(log_p.split(counts), is_best.split(counts), strict=True)
    return [Score(float(p.double().sum()), len(p), bool(best.all())) for p, best in pairs]


def token_scores(model: Decoder, hidden_NE: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return each target's log-probability in nats, and whether it is the likeliest token; both on the CPU."""
    at_once = max(1, LOGITS_AT_ONCE[hidden_NE.device.type] // model.config.vocab_size)
    log_p, is_best = [], []
    for hidden, targets in zip(hidden_NE.split(at_once), targets_N.split(at_once), strict=True):
        logits = model.logits(hidden).float()
        log_p.append(logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(dim=-1))
        is_best.append(logits.argmax(dim=-1) == targets)
    return torch.cat(log_p).cpu(), torch.cat(is_best).cpu()
