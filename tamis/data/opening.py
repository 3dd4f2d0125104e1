"""From a configuration to its loader, its validation batches, and one position out of the ranks' positions."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tamis.config import Config
from tamis.data.errors import DataError
from tamis.data.files import LocalFiles
from tamis.data.hub import open_hub
from tamis.data.loader import Loader, Samples
from tamis.data.order import Source
from tamis.data.sample import sample_source
from tamis.data.shards import ShardSamples, held_out_stretches
from tamis.data.stream import StreamSamples, held_out_tokens, merge_stream_states
from tamis.data.synthetic import VALIDATION, SyntheticSamples, noise
from tamis.data.tokenizer import TokenIds
from tamis.data.waiting import within


def open_loader(config: Config, *, rank: int = 0, world_size: int = 1) -> Loader:
    """The training batches of one rank."""
    try:
        what, limit_s = f"the data ({config.data.dataset})", config.data.loader_timeout_s
        samples = within(limit_s, what, lambda: open_samples(config, rank, world_size))
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
    if config.data.dataset == "shards":
        return ShardSamples(config, rank, world_size)
    return StreamSamples(config, open_source(config), rank, world_size)


def open_source(config: Config) -> Source:
    """The documents that `data.dataset` names."""
    data = config.data
    if data.dataset == "sample":
        return sample_source()
    if data.dataset == "fineweb_edu_local":
        return LocalFiles(str(data.local_path), data.text_column)
    if data.dataset == "fineweb_edu":
        return open_hub(data)
    raise DataError(f"data.dataset {data.dataset} holds no documents")


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The positions of all ranks as one that is valid for any world size."""
    if len({state["samples"] for state in states}) > 1:
        raise DataError(f"the ranks' data positions differ: {[state['samples'] for state in states]} samples")
    for state in states:
        if state["kind"] == "synthetic":  # one rank's noise brands the whole run
            return state
    return merge_stream_states(states) if states[0]["kind"] == "stream" else states[0]


def validation_batches(config: Config, *, rank: int = 0, world_size: int = 1) -> list[npt.NDArray[np.int32]]:
    """This rank's held-out batches, the same every time and equally many on every rank; none without a held-out part.

    Together the ranks hold the first eval_batches · batch_size · world_size held-out samples, or as many as there are.
    Where `data.synthetic_on_fail` lets training go on without the data there is no validation: noise tells nothing.
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
    rows = within(limit_s, "the held-out text", lambda: _held_out_rows(config, wanted))
    if config.data.val_fraction and len(rows) < world_size:
        raise DataError(
            f"{len(rows)} held-out samples of {train.seq_len} tokens are too few for {world_size} processes: raise "
            "data.val_fraction, lower train.seq_len, or set data.val_fraction: 0 to go without validation"
        )
    return rows


@functools.lru_cache(maxsize=1)  # every validation of a run uses the same ones; the source is read once
def _shared(config: Config, rank: int, world_size: int) -> tuple[npt.NDArray[np.int32], ...]:
    """One rank's batches; only when there is less than one whole batch is it a smaller one."""
    rows = _held_out(config, world_size)
    size, per_rank = config.train.batch_size, len(rows) // world_size
    own = rows[rank::world_size][:per_rank]
    batches = [np.stack(own[i : i + size]) for i in range(0, per_rank, size)]
    return tuple(batch for i, batch in enumerate(batches) if i == 0 or len(batch) == size)


def _held_out_rows(config: Config, wanted: int) -> list[npt.NDArray[np.int32]]:
    if config.data.dataset == "synthetic":
        return [noise(config, VALIDATION, number) for number in range(wanted)]
    if config.data.dataset == "shards":
        return held_out_stretches(config, wanted)
    if not config.data.val_fraction:
        return []
    return rows_of(held_out_tokens(config, open_source(config)), config.train.seq_len, wanted)


def rows_of(documents: Iterator[TokenIds], seq_len: int, wanted: int) -> list[npt.NDArray[np.int32]]:
    """The first samples of one packed row of documents; the next sample begins with the last one's last token."""
    pieces, available = [], 0
    for ids in documents:
        pieces.append(ids)
        available += len(ids)
        if available > wanted * seq_len:
            break
    tokens = np.concatenate(pieces).astype(np.int32) if pieces else np.empty(0, np.int32)
    count = min(wanted, max(0, len(tokens) - 1) // seq_len)
    return [tokens[i * seq_len : (i + 1) * seq_len + 1] for i in range(count)]
