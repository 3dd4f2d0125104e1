"""The texts of `tamis bench needle`: generated tasks after RULER (arXiv 2404.06654), asked at the end of a long text.

A text is random words that hide facts. A fact is a token that joins two names: the second follows from the first. It
may be written several times in a row, as a sentence takes several tokens.

    word word ANN→BOB word … word BOB→CAT word … word | ANN BOB CAT

The text ends with questions: a name, then the names that follow from it, which the model has to predict. The facts lie
farther from the questions than the window reaches.

- single: one fact, one question.
- keys: several facts that are neighbours, and a question for each. A mean over their block mixes their values.
- values: several facts share the first name, and all their second names are asked for, in any order.
- tracking: facts form a chain (ANN→BOB, BOB→CAT, …), and each answer is the question for the next.
- common: no facts. Some words are more frequent than the others, and are asked for in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WORDS = 32  # tokens 0 … WORDS−1
COMMON_SHARE = 0.3  # of the tokens in a text of common words; its other tokens are drawn from all words


@dataclass(frozen=True)
class RetrievalTask:
    """`questions` in a text, each with so many `answers`, one fact for each answer.

    `is_chain`: an answer is the first name of the next fact; otherwise all facts share the question's name.
    `group`: facts that are neighbours.
    """

    name: str
    questions: int
    answers: int
    is_chain: bool = True
    group: int = 1

    @property
    def has_facts(self) -> bool:
        return self.name != "common"

    @property
    def names(self) -> int:
        """Names in a text."""
        return self.questions * (self.answers + 1)

    @property
    def tail(self) -> int:
        """Tokens of all questions and answers."""
        if not self.has_facts:
            return 1 + self.answers
        return self.questions * (1 + self.answers if self.is_chain else 2 * self.answers)


def retrieval_tasks(names: int) -> tuple[RetrievalTask, ...]:
    """Return the tasks, each with as many questions as there are names for."""
    return (
        RetrievalTask("single", 1, 1),
        RetrievalTask("keys", names // 2, 1, group=4),
        RetrievalTask("values", names // 4, 3, is_chain=False),
        RetrievalTask("tracking-2", names // 4, 3),
        RetrievalTask("tracking-4", names // 6, 5),
        RetrievalTask("common", 1, 3, is_chain=False),
    )


def tokens_of_texts(names: int) -> int:
    """Tokens: words, names, facts, and the one that asks for common words."""
    return WORDS + names + names**2 + 1


@dataclass(frozen=True)
class RetrievalTexts:
    """Texts of one task and length: N texts, Q questions in each, A answers to each question."""

    tokens_NL: Tensor
    at_NQA: Tensor  # the position before each answer, which predicts it
    accepted_NQAA: Tensor  # the tokens that are right for each answer; −1: none
    depths_NQA: Tensor  # of each answer's fact: 0 first, 1 last possible; NaN without facts


def make_texts(
    task: RetrievalTask, texts: int, length: int, window: int, names: int, generator: torch.Generator, repeats: int = 1
) -> RetrievalTexts:
    """Return random texts of a task; `names` is the number of names there are, a fact takes `repeats` tokens."""
    reach = length - task.tail - window  # facts end before this
    facts = task.questions * task.answers
    if reach < max(2 * facts, repeats * (facts + task.group)):
        raise ValueError(f"{length} tokens leave no room for the task {task.name} beyond a window of {window}")
    if names < task.names:
        raise ValueError(f"the task {task.name} needs {task.names} names, got {names}")
    if task.has_facts:
        return _texts_with_facts(task, texts, length, reach, names, generator, repeats)
    return _texts_of_words(task, texts, length, names, generator)


def _texts_with_facts(
    task: RetrievalTask, texts: int, length: int, reach: int, names: int, generator: torch.Generator, repeats: int
) -> RetrievalTexts:
    device, shape = generator.device, (texts, task.questions, task.answers)
    tokens = torch.randint(WORDS, (texts, length), generator=generator, device=device)
    chosen = _distinct(names, texts, task.names, generator).view(texts, task.questions, -1)
    first = chosen[..., :-1] if task.is_chain else chosen[..., :1].expand(shape)
    second = chosen[..., 1:]
    places = _places(task, texts, reach, generator, repeats)
    facts = WORDS + names * (1 + first) + second
    tokens.scatter_(1, places.flatten(1), facts[..., None].expand(places.shape).flatten(1))
    tail = chosen if task.is_chain else torch.stack((first, second), -1)
    tokens[:, length - task.tail :] = WORDS + tail.flatten(1)
    before = torch.arange(task.tail, device=device).view(task.questions, -1)
    before = before[:, :-1] if task.is_chain else before[:, ::2]
    at = (length - task.tail + before).expand(shape)
    accepted = WORDS + second[..., None] if task.is_chain else _remaining(WORDS + second)
    return RetrievalTexts(tokens, at, accepted, places[..., 0] / max(1, reach - 1))


def _texts_of_words(
    task: RetrievalTask, texts: int, length: int, names: int, generator: torch.Generator
) -> RetrievalTexts:
    device = generator.device
    tokens = torch.randint(WORDS, (texts, length), generator=generator, device=device)
    common = _distinct(WORDS, texts, task.answers, generator)
    drawn = common.gather(1, torch.randint(task.answers, (texts, length), generator=generator, device=device))
    is_common = torch.rand(texts, length, generator=generator, device=device) < COMMON_SHARE
    tokens = torch.where(is_common, drawn, tokens)
    question = length - task.tail
    tokens[:, question] = tokens_of_texts(names) - 1  # the token that asks for common words
    tokens[:, question + 1 :] = common
    at = (question + torch.arange(task.answers, device=device)).expand(texts, 1, -1)
    return RetrievalTexts(tokens, at, _remaining(common[:, None]), torch.full(at.shape, torch.nan, device=device))


def _distinct(count: int, texts: int, chosen: int, generator: torch.Generator) -> Tensor:
    """Return `chosen` different numbers below `count` for each text, in random order."""
    return torch.rand(texts, count, generator=generator, device=generator.device).topk(chosen).indices


def _places(task: RetrievalTask, texts: int, reach: int, generator: torch.Generator, repeats: int) -> Tensor:
    """Return the tokens of each fact `[N,Q,A,repeats]`: groups of neighbours that do not overlap."""
    groups, size = task.questions * task.answers // task.group, task.group * repeats
    begin = size * _distinct(reach // size - 1, texts, groups, generator)
    begin += torch.randint(size, (texts, 1), generator=generator, device=generator.device)
    places = begin[..., None] + torch.arange(size, device=generator.device)
    return places.view(texts, task.questions, task.answers, repeats)


def _remaining(answers_NQA: Tensor) -> Tensor:
    """Return `[N,Q,A,A]`: for each answer those not given before it; −1 for the others."""
    count = answers_NQA.shape[-1]
    later = torch.ones(count, count, dtype=torch.bool, device=answers_NQA.device).triu()
    return answers_NQA[..., None, :].where(later, -1)
