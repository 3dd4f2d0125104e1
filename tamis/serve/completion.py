"""One completion from its request to its last piece: what to sample, the text so far, where it ends."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tamis.data.tokenizer import Tokenizer
from tamis.generate.sample import Sampling

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class TokenLogprobs:
    """A sampled token, its log-probability, and the likeliest ones with theirs."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Piece:
    """What a step adds to a completion. The last piece has a finish reason."""

    text: str
    finish: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    blocks: list[list[list[int]]] | None = None  # by layer and group: the selection blocks of the newest query
    error: str | None = None


class Completion:
    """One continuation of one prompt. The engine calls `add` for each token; pieces go to `emit`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: Sampling,
        emit: Callable[[Piece], None],
        *,
        stop: Sequence[str] = (),
        top_logprobs: int | None = None,
        with_blocks: bool = False,
        client: str = "",
    ) -> None:
        self.prompt, self.max_tokens, self.sampling = list(prompt), max_tokens, sampling
        self.top_logprobs, self.with_blocks, self.client = top_logprobs, with_blocks, client
        self.count = 0  # tokens sampled
        self.is_cancelled = False
        self.is_finished = False
        self._tokenizer, self._emit, self._stop = tokenizer, emit, [text for text in stop if text]
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._held = ""  # text that may be the beginning of a stop string
        self._logprobs: list[TokenLogprobs] = []

    def add(
        self, token: int, logprobs: TokenLogprobs | None = None, blocks: list[list[list[int]]] | None = None
    ) -> None:
        """Take the next token; emits text that is certain to belong to the completion."""
        self.count += 1
        is_end = token == self._tokenizer.eot
        if logprobs is not None and not is_end:
            self._logprobs.append(logprobs)
        is_last = is_end or self.count >= self.max_tokens
        self._held += self._decode(b"" if is_end else self._tokenizer.to_bytes([token]), is_last)
        found = min((at for at in map(self._held.find, self._stop) if at >= 0), default=None)
        if found is not None:
            self._held = self._held[:found]
            self._finish("stop", blocks)
        elif is_last:
            self._finish("stop" if is_end else "length", blocks)
        else:
            self._release(blocks)

    def cancel(self) -> None:
        """Ask the engine to drop this completion; safe from any thread."""
        self.is_cancelled = True

    def fail(self, reason: FinishReason, error: str | None = None) -> None:
        """End without another token."""
        if not self.is_finished:
            self.is_finished = True
            self._emit(Piece("", reason, error=error))

    def _release(self, blocks: list[list[list[int]]] | None) -> None:
        kept = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        text, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        if text or blocks is not None:
            self._emit(Piece(text, None, self._taken_logprobs(), blocks))

    def _finish(self, reason: FinishReason, blocks: list[list[list[int]]] | None) -> None:
        self.is_finished = True
        self._emit(Piece(self._held, reason, self._taken_logprobs(), blocks))

    def _taken_logprobs(self) -> list[TokenLogprobs]:
        taken, self._logprobs = self._logprobs, []
        return taken


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
