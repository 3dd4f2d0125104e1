"""The supported part of OpenAI's HTTP interface: requests as types, answers as JSON.

Unknown and unsupported parameters are refused by name. Ours beyond OpenAI's: `top_k` and `blocks`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tamis.data.tokenizer import Tokenizer
from tamis.generate.sample import Sampling
from tamis.serve.completion import Completion, Piece, TokenLogprobs

MOST_CHOICES = 128  # prompts times n
MOST_TOP_LOGPROBS = 20
LARGEST_SEED = 2**53
Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class Parameters(BaseModel):
    """What completions and chat completions share."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, le=10**7)
    temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, le=10**7)
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    seed: int | None = Field(None, ge=-LARGEST_SEED, le=LARGEST_SEED)
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    blocks: bool = False  # add the selection blocks of the newest token to each piece of a stream
    # Accepted only where they change nothing.
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def top_logprobs_wanted(self) -> int | None:
        return None

    def samplings(self, choices: int) -> list[Sampling]:
        """Settings of each choice: with a seed, that and the next ones."""
        first = secrets.randbelow(LARGEST_SEED) if self.seed is None else self.seed
        return [Sampling(self.temperature, self.top_k, self.top_p, first + index) for index in range(choices)]


class CompletionRequest(Parameters):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    echo: bool = False
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Token ids of every prompt."""
        several: Sequence[Any] = [self.prompt] if isinstance(self.prompt, str) or _is_ids(self.prompt) else self.prompt
        return [[int(i) for i in tokenizer.encode(one)] if isinstance(one, str) else list(one) for one in several]


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "user", "assistant"]
    content: str
    name: str | None = None


class ChatRequest(Parameters):
    messages: list[ChatMessage] = Field(min_length=1, max_length=1000)
    max_completion_tokens: int | None = Field(None, ge=1, le=10**7)
    logprobs: Literal[False] | None = None


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(one, int) for one in prompt)


class Answer:
    """JSON of one request's answers, for text and for chat."""

    def __init__(self, model: str, tokenizer: Tokenizer, is_chat: bool) -> None:
        self.model, self.tokenizer, self.is_chat = model, tokenizer, is_chat
        self.id = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    def whole(self, completions: Sequence[Completion], texts: Sequence[str], ends: Sequence[Piece]) -> dict[str, Any]:
        rows = zip(texts, ends, strict=True)
        choices = [self._choice(index, text, end) for index, (text, end) in enumerate(rows)]
        return self._frame(choices, False) | {"usage": usage(completions)}

    def chunk(self, index: int, piece: Piece, text: str) -> dict[str, Any]:
        choice = self._choice(index, text, piece, is_chunk=True)
        if piece.blocks is not None:
            choice["blocks"] = piece.blocks
        return self._frame([choice], True)

    def last_chunk(self, completions: Sequence[Completion]) -> dict[str, Any]:
        return self._frame([], True) | {"usage": usage(completions)}

    def _frame(self, choices: list[dict[str, Any]], is_chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if is_chunk else "chat.completion") if self.is_chat else "text_completion"
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return head | {"choices": choices}

    def _choice(self, index: int, text: str, piece: Piece, is_chunk: bool = False) -> dict[str, Any]:
        if self.is_chat:
            content = {"role": "assistant", "content": text}
            return {"index": index, "delta" if is_chunk else "message": content, "finish_reason": piece.finish}
        logprobs = self._logprobs(piece.logprobs) if piece.logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": piece.finish}

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        def name(token: int) -> str:
            return self.tokenizer.to_bytes([token]).decode(errors="replace")

        names = [name(one.token) for one in tokens]
        return {
            "tokens": names,
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [{name(token): value for token, value in one.top} for one in tokens],
            "text_offset": [sum(map(len, names[:index])) for index in range(len(names))],
        }


def usage(completions: Sequence[Completion]) -> dict[str, int]:
    """Tokens read and sampled; a prompt that several choices share counts once per choice."""
    prompt, sampled = sum(len(one.prompt) for one in completions), sum(one.count for one in completions)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def error_body(message: str, kind: str = "invalid_request_error", parameter: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": parameter, "code": None}}
