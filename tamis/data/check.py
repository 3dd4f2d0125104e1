"""`tamis data check`: a few batches through the real loader, with text, speed and the ranks' shares."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tamis.config import Config
from tamis.data.errors import DataError
from tamis.data.loader import Loader
from tamis.data.opening import open_loader, validation_batches
from tamis.data.shards import damaged_shards
from tamis.data.tokenizer import tokenizer_for

OK, DATA_FAILURE = 0, 6
RANKS_COMPARED = 2
TEXT_SHOWN = 100  # characters of each batch

Say = Callable[[str], None]


def run_data_check(config: Config, batches: int = 4, *, show_text: bool = True, say: Say = print) -> int:
    """Fetch batches as training does and report each; returns 0, or 6 after printing the reason."""
    try:
        _check(config, batches, show_text, say)
    except DataError as error:
        say(f"FAILED: {error}")
        return DATA_FAILURE
    return OK


def _check(config: Config, batches: int, show_text: bool, say: Say) -> None:
    if config.data.dataset == "shards":
        _check_shards(Path(str(config.data.local_path)), say)
    began = time.perf_counter()
    loader = open_loader(config)
    say(f"{loader.description}; opened in {time.perf_counter() - began:.2f} s")
    try:
        _check_batches(config, loader, batches, show_text, say)
    finally:
        loader.close()
    if loader.is_synthetic and config.data.dataset != "synthetic":
        raise DataError(f"noise replaced the data (data.synthetic_on_fail): {loader.description}")
    _check_shares(config, say)
    _check_validation(config, say)


def _check_batches(config: Config, loader: Loader, batches: int, show_text: bool, say: Say) -> None:
    tokenizer = tokenizer_for(config.data.tokenizer)
    speed = _Speed()
    for i in range(batches):
        batch = loader.next()
        rows = batch.tokens.reshape(-1, batch.tokens.shape[-1])
        _check_rows(rows, config)
        say(f"ok batch[{i}] lens: {[len(row) for row in rows]} in {batch.fetch_s:.3f} s")
        if show_text and not loader.is_synthetic:
            say(f"   {tokenizer.decode(rows[0].tolist())[:TEXT_SHOWN]!r}")
        if i == 0:
            say(f"first batch after {batch.fetch_s:.2f} s")
            speed = _Speed()
    p50, p95 = loader.fetch_percentiles()
    say(f"wait p50 {p50:.4f} s, p95 {p95:.4f} s")
    if batches > 1:
        say(f"after the first batch {speed.of((batches - 1) * config.tokens_per_step(1))}")


class _Speed:
    """Tokens per second of wall time and of CPU time; a busy machine slows only the first."""

    def __init__(self) -> None:
        self._clock, self._own = time.perf_counter(), time.process_time()

    def of(self, tokens: int) -> str:
        clock, own = time.perf_counter() - self._clock, time.process_time() - self._own
        return f"{tokens / clock:,.0f} tok/s, {tokens / own:,.0f} per second of processor time"


def _check_rows(rows: npt.NDArray[np.int32], config: Config) -> None:
    if rows.shape[1] != config.train.seq_len + 1:
        raise DataError(f"rows hold {rows.shape[1]} tokens, not train.seq_len + 1 = {config.train.seq_len + 1}")
    if rows.min() < 0 or rows.max() >= config.vocab_size:
        raise DataError(f"token ids {rows.min()}–{rows.max()} are outside the vocabulary of {config.vocab_size}")


def _check_shards(folder: Path, say: Say) -> None:
    if damaged := damaged_shards(folder):
        raise DataError(f"damaged shards in {folder}: {', '.join(damaged)}; prepare the data again")
    say("ok shards: every file has the checksum of the manifest")


def _check_shares(config: Config, say: Say) -> None:
    """Check that the batches of all ranks together are the batch of a single process."""
    if config.data.dataset not in ("shards", "synthetic") and config.data.lanes % RANKS_COMPARED:
        return say(f"ranks not compared: data.lanes {config.data.lanes} is not a multiple of {RANKS_COMPARED}")
    alone = config.model_copy(
        update={"train": config.train.model_copy(update={"batch_size": config.train.batch_size * RANKS_COMPARED})}
    )
    whole = _first_rows(alone, 0, 1)
    shares = [_first_rows(config, rank, RANKS_COMPARED) for rank in range(RANKS_COMPARED)]
    if not all(np.array_equal(share, whole[rank::RANKS_COMPARED]) for rank, share in enumerate(shares)):
        raise DataError(
            f"the batches of {RANKS_COMPARED} ranks are not the parts of one global batch: report this fault"
        )
    say(f"ok ranks: {RANKS_COMPARED} ranks have disjoint shares, together the global batch of {len(whole)} rows")


def _first_rows(config: Config, rank: int, world_size: int) -> npt.NDArray[np.int32]:
    loader = open_loader(config, rank=rank, world_size=world_size)
    try:
        tokens = loader.next().tokens
        return tokens.reshape(-1, tokens.shape[-1])
    finally:
        loader.close()


def _check_validation(config: Config, say: Say) -> None:
    began = time.perf_counter()
    held_out = validation_batches(config)
    rows = sum(len(batch) for batch in held_out)
    say(f"ok validation: {len(held_out)} batches, {rows} rows of held-out text, in {time.perf_counter() - began:.2f} s")
