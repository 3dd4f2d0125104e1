"""Open the loader and the validation batches of a configuration, and merge the ranks' data positions."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tamis.config import Config
from tamis.config.schema import LOCAL
from tamis.data.errors import DataError, EndOfData
from tamis.data.hub import open_hub
from tamis.data.loader import Loader, Samples
from tamis.data.local_files import LocalFiles
from tamis.data.mixture import MixtureSamples, merge_mixture_states, mixed_rows
from tamis.data.order import Source
from tamis.data.sample import sample_source
from tamis.data.shards import ShardSamples, held_out_stretches
from tamis.data.stream import StreamSamples, held_out_tokens, merge_stream_states
from tamis.data.synthetic import VALIDATION, SyntheticSamples, noise
from tamis.data.tokenizer import TokenIds, tokenizer_for

T = TypeVar("T")


def open_loader(config: Config, *, rank: int = 0, world_size: int = 1) -> Loader:
    """Open the training batches of one rank."""
    try:
        what, limit_s = f"the data ({config.data.dataset})", config.data.loader_timeout_s
        samples = with_time_limit(limit_s, what, lambda: open_samples(config, rank, world_size))
        return Loader(config, samples, rank, world_size)
    except DataError as error:
        if not config.data.synthetic_on_fail:
            raise
        loader = Loader(config, SyntheticSamples(config, rank, world_size), rank, world_size)
        loader.substitute_noise(str(error))
        return loader


def open_samples(config: Config, rank: int, world_size: int) -> Samples:
    if config.data.dataset == "synthetic":
        return SyntheticSamples(config, rank, world_size)
    if (found := tokenizer_for(config.data.tokenizer).vocab_size) != config.vocab_size:
        raise DataError(
            f"data.vocab_size is {config.vocab_size} and {config.data.tokenizer} has {found} tokens: "
            "set data.vocab_size to null, or give the tokenizer that the model was trained with"
        )
    if config.data.dataset == "mixture":
        return MixtureSamples(config, open_samples, rank, world_size)
    if config.data.dataset == "shards":
        return ShardSamples(config, rank, world_size)
    return StreamSamples(config, open_source(config), rank, world_size)


def open_source(config: Config) -> Source:
    """Open the documents of `data.dataset`."""
    data = config.data
    if data.dataset == "sample":
        return sample_source()
    if data.dataset in LOCAL:
        return LocalFiles(str(data.local_path), data.text_column)
    if data.dataset == "fineweb_edu":
        return open_hub(data)
    raise DataError(f"data.dataset {data.dataset} holds no documents: name one source of text")


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the positions of all ranks into one that is valid for any world size."""
    if len({state["samples"] for state in states}) > 1:
        raise DataError(f"the ranks' data positions differ: {[state['samples'] for state in states]} samples")
    for state in states:
        if state["kind"] == "synthetic":  # noise on one rank marks the whole run
            return state
    if states[0]["kind"] == "mixture":
        return merge_mixture_states(states, merge_states)
    return merge_stream_states(states) if states[0]["kind"] == "stream" else states[0]


def validation_batches(config: Config, *, rank: int = 0, world_size: int = 1) -> list[npt.NDArray[np.int32]]:
    """Held-out batches of this rank: the same every time, and equally many on every rank.

    Together the ranks hold the first eval_batches · batch_size · world_size held-out samples, or all there are.
    If the data fails and `data.synthetic_on_fail` is set, there are none.
    """
    try:
        return list(_shared(config, rank, world_size))
    except DataError:
        if config.data.synthetic_on_fail:
            return []
        raise


def _held_out(config: Config, world_size: int) -> list[npt.NDArray[np.int32]]:
    train = config.train
    wanted = train.eval_batches * train.batch_size * world_size
    limit_s = config.data.loader_timeout_s * train.eval_batches
    rows = with_time_limit(limit_s, "the held-out text", lambda: _held_out_rows(config, wanted))
    if config.data.val_fraction and len(rows) < world_size:
        raise EndOfData(
            f"{len(rows)} held-out samples of {train.seq_len} tokens are too few for {world_size} processes: raise "
            "data.val_fraction, lower train.seq_len, or set data.val_fraction: 0 to train without validation"
        )
    return rows


@functools.lru_cache(maxsize=1)  # all validations of a run use the same batches; the source is read once
def _shared(config: Config, rank: int, world_size: int) -> tuple[npt.NDArray[np.int32], ...]:
    """Batches of one rank; a partial batch only if there is no whole one."""
    rows = _held_out(config, world_size)
    size, per_rank = config.train.batch_size, len(rows) // world_size
    own = rows[rank::world_size][:per_rank]
    batches = [np.stack(own[i : i + size]) for i in range(0, per_rank, size)]
    return tuple(batch for i, batch in enumerate(batches) if i == 0 or len(batch) == size)


def _held_out_rows(config: Config, wanted: int) -> list[npt.NDArray[np.int32]]:
    if config.data.dataset == "synthetic":
        return [noise(config, VALIDATION, number) for number in range(wanted)]
    if config.data.dataset == "mixture":
        return mixed_rows(config, _held_out_rows, wanted)
    if config.data.dataset == "shards":
        return held_out_stretches(config, wanted)
    if not config.data.val_fraction:
        return []
    return first_samples(held_out_tokens(config, open_source(config)), config.train.seq_len, wanted)


def first_samples(documents: Iterator[TokenIds], seq_len: int, wanted: int) -> list[npt.NDArray[np.int32]]:
    """The first samples of one packed row of documents; each begins with the last token of the one before."""
    pieces, available = [], 0
    for ids in documents:
        pieces.append(ids)
        available += len(ids)
        if available > wanted * seq_len:
            break
    tokens = np.concatenate(pieces).astype(np.int32) if pieces else np.empty(0, np.int32)
    count = min(wanted, max(0, len(tokens) - 1) // seq_len)
    return [tokens[i * seq_len : (i + 1) * seq_len + 1] for i in range(count)]


def with_time_limit(seconds: float, what: str, call: Callable[[], T]) -> T:
    """Return the result of a call, or raise a DataError if it takes too long; a hung call is left in its thread."""
    outcome: list[tuple[T | None, BaseException | None]] = []

    def work() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:  # raised again in the caller's thread
            outcome.append((None, error))

    thread = threading.Thread(target=work, name="tamis-data-wait", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise DataError(
            f"{what} did not come within {seconds:g} s: check the network or the disk the data is on, "
            "or raise data.loader_timeout_s (--loader-timeout)"
        )
    result, error = outcome[0]
    if error:
        raise error
    return result  # type: ignore[return-value]
