"""The needle task: facts hidden in a long filler, asked for at the end, far beyond the window.

A fact is one token that joins a key and a value; a question is a key, and its answer the value. The facts lie side by
side: a mean over their block tells that they are there, but mixes their values, so that the answer must be read from
the token itself. The filler obeys a local rule (each token follows from the one two before it), so that short-range
attention has work of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KEYS, VALUES, FILLERS = 8, 8, 16
FIRST_FACT = FILLERS
FIRST_QUESTION = FIRST_FACT + KEYS * VALUES
FIRST_ANSWER = FIRST_QUESTION + KEYS
RESTART = 12  # tokens after which the filler begins anew: nothing far away helps to predict it
ECHO = 2  # the filler's rule: one more than the token this far back


@dataclass(frozen=True)
class Needles:
    """`tokens [B,L]`; where each question stands, the depth of its fact (0 first, 1 last possible), and its answer."""

    tokens: Tensor
    questions_BQ: Tensor
    depths_BQ: Tensor
    answers_BQ: Tensor
    predictable_BL: Tensor  # positions whose next token follows from the filler's rule


def make_needles(batch: int, length: int, window: int, questions: int, generator: torch.Generator) -> Needles:
    """One fact for each question, each with its own key, before the last `window` tokens ahead of the questions."""
    tail = 2 * questions
    reach = length - tail - window
    if reach < questions:
        raise ValueError(f"{length} tokens leave no room for {questions} facts beyond a window of {window}")
    tokens, predictable = _filler(batch, length, generator)
    first = torch.randint(reach - questions + 1, (batch, 1), generator=generator)
    places = first + torch.stack([torch.randperm(questions, generator=generator) for _ in range(batch)])
    keys = torch.stack([torch.randperm(KEYS, generator=generator)[:questions] for _ in range(batch)])
    values = torch.randint(VALUES, (batch, questions), generator=generator)
    tokens.scatter_(1, places, FIRST_FACT + keys * VALUES + values)
    at = length - tail + 2 * torch.arange(questions).expand(batch, -1)
    tokens.scatter_(1, at, FIRST_QUESTION + keys)
    tokens.scatter_(1, at + 1, FIRST_ANSWER + values)
    is_filler = tokens < FILLERS
    # A token is predictable if it, the one it echoes and the one before it are filler.
    known = predictable & is_filler
    known[:, ECHO:] &= is_filler[:, :-ECHO]
    predictable_next = torch.zeros_like(known)
    predictable_next[:, :-1] = known[:, 1:]
    return Needles(tokens, at, places / max(1, reach - 1), FIRST_ANSWER + values, predictable_next)


def _filler(batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Runs of RESTART tokens, each begun by ECHO random ones; and which tokens the rule gives."""
    runs = -(-length // RESTART)
    seeds = torch.randint(FILLERS, (batch, runs, ECHO), generator=generator)
    step = torch.arange(RESTART)
    tokens = (seeds[:, :, step % ECHO] + step // ECHO) % FILLERS
    ruled = (step >= ECHO).expand(batch, runs, RESTART)
    return tokens.flatten(1)[:, :length].contiguous(), ruled.flatten(1)[:, :length].contiguous()
