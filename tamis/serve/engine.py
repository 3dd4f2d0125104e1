"""Continuous batching: one thread that decodes all running completions together and admits waiting ones in between.

The cache has one row per running completion. A prompt is read tile by tile between decode steps, so that a long one
does not stop the others. Rows without a completion take part in a step and their result is ignored: the batch keeps
its shape, and a GPU replays one graph.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tamis.attention.cache import NSACache
from tamis.generate.sample import DecodeStep, TileReader
from tamis.model import Decoder
from tamis.run.files.console import counted
from tamis.serve.completion import Completion, TokenLogprobs
from tamis.serve.sampling import choose_each

MOST_WAITING = 1024  # completions; beyond it a request is refused
# Prompt tokens between two decode steps. A GPU's host takes as long to launch a tile of 4,096 as one of 16,384 runs.
TILE = {"cuda": 16384, "cpu": 256}
IDLE_TOKEN = 0  # what a free row reads
# Tokens of a last tile: whole multiples of 16 and others, short and long, compile to different kernels.
LAST_TILES = (17, 1000, 1001, 2047, 2048, 3333, 4800, 9001)


class Busy(Exception):
    """Too many completions wait; the client may try again later."""


@dataclass
class Counters:
    """Totals since the start, for /metrics."""

    requests: int = 0
    refused: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    busy_s: float = 0.0


@dataclass
class Row:
    """A row of the cache and the completion in it."""

    completion: Completion
    reader: TileReader
    unread: list[int]  # prompt tokens that are not in the cache yet
    draws: torch.Generator


@dataclass
class _Waiting:
    """Completions that wait, by client: each client in turn, its own in order."""

    clients: OrderedDict[str, deque[Completion]] = field(default_factory=OrderedDict)

    def put(self, completion: Completion) -> None:
        self.clients.setdefault(completion.client, deque()).append(completion)

    def take(self) -> Completion | None:
        while self.clients:
            client, queue = self.clients.popitem(last=False)
            completion = queue.popleft()
            if queue:
                self.clients[client] = queue
            if not completion.is_cancelled:
                return completion
            completion.fail("cancelled")
        return None

    def __len__(self) -> int:
        return sum(map(len, self.clients.values()))


class Engine:
    """Runs completions of one model. `submit` and `Completion.cancel` may be called from any thread."""

    def __init__(self, model: Decoder, rows: int, max_len: int | None = None) -> None:
        self.model, self.max_len = model, max_len or model.max_len
        self.device = model.embedding.weight.device
        self.cache = model.new_cache(rows, self.max_len)
        self.counters = Counters()
        self._rows: list[Row | None] = [None] * rows
        # What predicts the next token of each row. All rows go through every product, with or without others: a
        # product of another shape rounds differently, and a completion's text would depend on the others.
        self._hidden_RE = model.embedding.weight.new_zeros(rows, model.embedding.weight.shape[1])
        self._step = DecodeStep(model, self.cache)
        self._waiting = _Waiting()
        self._change = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compile the kernels of prompts and capture the decode step, before the first request would wait for it."""
        tile = TILE[self.device.type]
        prompts = [*LAST_TILES, *(tile + last for last in LAST_TILES)]
        for length in sorted({min(length, self.max_len - 1) for length in prompts}):
            self.cache.reset()
            read = TileReader(self.model, self.cache.row(0), capture=False)
            for piece in torch.zeros(1, length, dtype=torch.int64, device=self.device).split(tile, dim=1):
                read(piece)
        self.cache.reset()
        self._step(torch.zeros(len(self._rows), dtype=torch.int64, device=self.device))
        self.cache.reset()

    def stop(self, seconds: float) -> None:
        """Refuse new completions, let running ones end for some seconds, then cancel what is left."""
        with self._change:
            self._is_stopping = True
            self._change.notify()
        self._thread.join(seconds)
        for completion in self.running():
            completion.cancel()
        self._thread.join(10.0)

    def submit(self, completion: Completion) -> None:
        """Queue a completion. Raises Busy when too many wait, ValueError when it does not fit the cache."""
        if len(completion.prompt) + completion.max_tokens > self.max_len:
            prompt = counted(len(completion.prompt), "token")
            raise ValueError(
                f"the prompt has {prompt}; with max_tokens={completion.max_tokens} that is more "
                f"than the {self.max_len} of this server: shorten it or ask for fewer"
            )
        with self._change:
            if self._is_stopping or len(self._waiting) >= MOST_WAITING:
                self.counters.refused += 1
                raise Busy("the server is shutting down" if self._is_stopping else f"{MOST_WAITING} completions wait")
            self.counters.requests += 1
            self._waiting.put(completion)
            self._change.notify()

    def running(self) -> list[Completion]:
        return [row.completion for row in list(self._rows) if row is not None]

    @property
    def waiting(self) -> int:
        with self._change:
            return len(self._waiting)

    def _run(self) -> None:
        while self._admit():
            started = time.perf_counter()
            try:
                self._advance()
            except Exception as error:  # one bad batch must not end the server
                for index, row in enumerate(self._rows):
                    if row is not None:
                        row.completion.fail("error", f"{type(error).__name__}: {error}")
                        self._free(index)
            self.counters.busy_s += time.perf_counter() - started

    def _admit(self) -> bool:
        """Fill free rows, and wait if there is nothing to do; False at the end."""
        with self._change:
            self._change.wait_for(lambda: self._is_stopping or len(self._waiting) or any(self._rows))
            for index, row in enumerate(self._rows):
                if row is None and (completion := self._waiting.take()) is not None:
                    self._place(index, completion)
            return any(self._rows) or not self._is_stopping

    def _place(self, index: int, completion: Completion) -> None:
        reader = TileReader(self.model, self.cache.row(index), capture=False)
        draws = torch.Generator().manual_seed(completion.sampling.seed)
        self._rows[index] = Row(completion, reader, list(completion.prompt), draws)

    @torch.no_grad()
    def _advance(self) -> None:
        """Read one tile of one prompt, then decode one token of every completion whose prompt is read."""
        for index, row in enumerate(self._rows):
            if row is not None and row.completion.is_cancelled:
                self.counters.cancelled += 1
                row.completion.fail("cancelled")
                self._free(index)
        reading = next((index for index, row in enumerate(self._rows) if row is not None and row.unread), None)
        if reading is not None:
            self._read_tile(reading)
        ready = [index for index, row in enumerate(self._rows) if row is not None and not row.unread]
        if ready:
            self._decode(ready)

    def _read_tile(self, index: int) -> None:
        row = self._row(index)
        tile = row.unread[: TILE[self.device.type]]
        row.unread = row.unread[len(tile) :]
        self._hidden_RE[index] = row.reader(torch.tensor([tile], device=self.device))[0]
        self.counters.prompt_tokens += len(tile)

    def _decode(self, ready: list[int]) -> None:
        rows = [self._row(index) for index in ready]
        logits_BV = self.model.logits(self._hidden_RE)[ready]
        uniform_B = torch.stack([torch.rand((), generator=row.draws) for row in rows]).to(self.device)
        tokens_B = choose_each(logits_BV, uniform_B, [row.completion.sampling for row in rows])
        tokens, logprobs = tokens_B.tolist(), self._logprobs(logits_BV, tokens_B, rows)
        for index, row, token, found in zip(ready, rows, tokens, logprobs, strict=True):
            row.completion.add(token, found, self._blocks(index) if row.completion.with_blocks else None)
            if row.completion.is_finished:
                self._free(index)
        self.counters.generated_tokens += len(ready)
        self._append({i: token for i, token in zip(ready, tokens, strict=True) if self._rows[i] is not None})

    def _append(self, tokens: dict[int, int]) -> None:
        """Let the model read the new token of each row.

        The other rows read an idle token into their next slot, which their next real token overwrites.
        """
        if not tokens:
            return
        lengths, positions = self.cache.lengths_B.clone(), self.cache.positions_B.clone()
        batch = [tokens.get(index, IDLE_TOKEN) for index in range(len(self._rows))]
        self._hidden_RE.copy_(self._step(torch.tensor(batch, device=self.device)))
        read = torch.tensor([index in tokens for index in range(len(self._rows))])
        torch.add(lengths, read, out=self.cache.lengths_B)
        torch.add(positions, read.to(self.device), out=self.cache.positions_B)
        self.counters.steps += 1

    def _row(self, index: int) -> Row:
        row = self._rows[index]
        assert row is not None
        return row

    def _free(self, index: int) -> None:
        self._rows[index] = None
        self.cache.lengths_B[index] = 0
        self.cache.positions_B[index] = 0

    def _logprobs(self, logits_BV: Tensor, tokens_B: Tensor, rows: list[Row]) -> list[TokenLogprobs | None]:
        wanted = [row.completion.top_logprobs for row in rows]
        if all(count is None for count in wanted):
            return [None] * len(rows)
        logprobs_BV = logits_BV.float().log_softmax(dim=-1)
        return [
            None if count is None else _token_logprobs(logprobs_BV[number], int(tokens_B[number]), count)
            for number, count in enumerate(wanted)
        ]

    def _blocks(self, index: int) -> list[list[list[int]]]:
        """The selection blocks of the newest query in every NSA layer, by group."""
        layers = [layer for layer in self.cache.layers if isinstance(layer, NSACache)]
        return [[[b for b in group if b >= 0] for group in layer.chosen_BGn[index].tolist()] for layer in layers]


def _token_logprobs(logprobs_V: Tensor, token: int, count: int) -> TokenLogprobs:
    values, ids = logprobs_V.topk(count)
    return TokenLogprobs(token, float(logprobs_V[token]), list(zip(ids.tolist(), values.tolist(), strict=True)))


def rows_that_fit(model: Decoder, max_len: int, most: int) -> int:
    """Rows of a cache that fit 80% of the GPU's free memory; on a CPU, `most`."""
    device = model.embedding.weight.device
    if device.type != "cuda":
        return most
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(most, int(0.8 * free) // model.new_cache(1, max_len).bytes))
