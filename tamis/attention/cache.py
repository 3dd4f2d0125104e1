"""Caches of keys and values for inference, allocated once and written in place.

An NSA layer keeps every key and value for selection, a ring of the window's, the compressed ones (one every `d` tokens)
and the newest `l` before compression, unrotated, from which the next block is made.

Shapes: B batch, T capacity in tokens, W slots of a ring, N compressed blocks, G groups, D head dim, 2: key, then value.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tamis.attention.decode import use_kernels
from tamis.attention.spec import DeviceStart, NSASpec, Start

WIDEST_COMPRESSED = 256  # bytes of a head: wider ones do not fit the kernel that compresses


class Ring:
    """Keys and values of the newest `size` tokens; token `t` lies in slot `t % size`."""

    def __init__(self, slots_BW2GD: Tensor) -> None:
        self.slots_BW2GD = slots_BW2GD

    @property
    def size(self) -> int:
        return self.slots_BW2GD.shape[1]

    def newest(self, count: int, end: int) -> Tensor:
        """Return the `count` tokens before position `end`, oldest first."""
        parts = [self.slots_BW2GD[:, part] for part in self._slots(count, end)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def newest_of_each(self, positions_B: Tensor) -> Tensor:
        """Return all `size` tokens up to each sequence's position; slots never written hold zeros."""
        steps = torch.arange(1, self.size + 1, device=positions_B.device)
        slots_BW = (positions_B[:, None] + steps) % self.size
        return self.slots_BW2GD[_rows(positions_B)[:, None], slots_BW]

    def write(self, new_BS2GD: Tensor, start: int) -> None:
        end, kept = start + new_BS2GD.shape[1], min(self.size, new_BS2GD.shape[1])
        parts = self._slots(kept, end)
        new = new_BS2GD[:, new_BS2GD.shape[1] - kept :].split([part.stop - part.start for part in parts], dim=1)
        for part, tokens in zip(parts, new, strict=True):
            self.slots_BW2GD[:, part] = tokens

    def write_one(self, new_B2GD: Tensor, positions_B: Tensor) -> None:
        self.slots_BW2GD[_rows(positions_B), positions_B % self.size] = new_B2GD

    def _slots(self, count: int, end: int) -> list[slice]:
        """Return the slots of the `count` tokens before `end`, oldest first: at most two runs."""
        begin = (end - count) % self.size
        first = min(count, self.size - begin)
        return [slice(begin, begin + first)] + ([slice(0, count - first)] if count > first else [])


class NSACache:
    """The keys and values of one NSA layer, and what its newest query chose and read."""

    def __init__(
        self,
        spec: NSASpec,
        phi: str,
        groups: int,
        dim: int,
        batch: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.max_blocks = spec.compressed_blocks(max_len)
        self.compressed_by_kernels = phi == "mlp" and dim * dtype.itemsize <= WIDEST_COMPRESSED

        def allocate(tokens: int) -> Tensor:
            return torch.zeros(batch, tokens, 2, groups, dim, dtype=dtype, device=device)

        self.selected_BT2GD = allocate(max_len)
        # One more row than there are blocks: a step that completes no block writes there and needs no branch.
        self.compressed_BN2GD = allocate(self.max_blocks + 1)
        self.window = Ring(allocate(min(spec.w, max_len)))
        self.tail = Ring(allocate(spec.l))
        self.chosen_BGn = torch.full((batch, groups, spec.n_sel), -1, dtype=torch.int32, device=device)
        self.reads_BG = torch.zeros(batch, groups, dtype=torch.int32, device=device)  # by the last step

    @property
    def written_by_kernels(self) -> bool:
        return self.compressed_by_kernels and use_kernels(self.selected_BT2GD)

    def write_block(self, new_B2GD: Tensor, positions_B: Tensor) -> None:
        """Store the block that ends at each sequence's position, if one does."""
        first_token = positions_B + 1 - self.spec.l
        complete = (first_token >= 0) & (first_token % self.spec.d == 0)
        block = torch.where(complete, first_token // self.spec.d, self.max_blocks)
        self.compressed_BN2GD[_rows(positions_B), block] = new_B2GD

    def write_one(self, new_B2GD: Tensor, positions_B: Tensor) -> None:
        self.selected_BT2GD[_rows(positions_B), positions_B] = new_B2GD

    def row(self, index: int) -> NSACache:
        one, rows = copy.copy(self), slice(index, index + 1)
        one.selected_BT2GD, one.compressed_BN2GD = self.selected_BT2GD[rows], self.compressed_BN2GD[rows]
        one.window, one.tail = Ring(self.window.slots_BW2GD[rows]), Ring(self.tail.slots_BW2GD[rows])
        one.chosen_BGn, one.reads_BG = self.chosen_BGn[rows], self.reads_BG[rows]
        return one

    def tensors(self) -> list[Tensor]:
        return [self.selected_BT2GD, self.compressed_BN2GD, self.window.slots_BW2GD, self.tail.slots_BW2GD]


class LayerCache(Protocol):
    """What one layer keeps of the tokens read."""

    def row(self, index: int) -> Any: ...

    def tensors(self) -> list[Tensor]: ...


class Cache:
    """The caches of several layers for `batch` sequences of up to `max_len` tokens each, and the sequences' lengths."""

    def __init__(self, layers: Sequence[LayerCache], batch: int, max_len: int) -> None:
        if batch < 1 or max_len < 1:
            raise ValueError(f"a cache needs room for at least 1 sequence of 1 token, got {batch} of {max_len}")
        self.max_len, self.layers = max_len, list[Any](layers)
        self.lengths_B = torch.zeros(batch, dtype=torch.int64)  # on the host, for checks without a host sync
        device = self.layers[0].tensors()[0].device
        self.positions_B = torch.zeros(batch, dtype=torch.int64, device=device)  # the same numbers, for the kernels

    @property
    def batch(self) -> int:
        return len(self.lengths_B)

    def reserve(self, tokens: int) -> None:
        """Add `tokens` to every length, or refuse; the code that writes the tokens advances `positions_B`."""
        longest = int(self.lengths_B.max()) + tokens
        if longest > self.max_len:
            raise ValueError(
                f"{longest} tokens do not fit the cache of {self.max_len}: shorten the prompt, ask for fewer new "
                f"tokens, or build the model with a larger max_len"
            )
        self.lengths_B += tokens

    def common_length(self) -> int:
        """Return the length all sequences share; a tile can only be added if they do."""
        length = int(self.lengths_B[0])
        if bool((self.lengths_B != length).any()):
            raise ValueError(
                f"sequences of lengths {self.lengths_B.tolist()} cannot be extended together: extend cache.row(i)"
            )
        return length

    def tile_start(self, tokens: int) -> Start:
        """Return where a tile of `tokens` begins: a DeviceStart if kernels write every layer and the window is full.

        Before that, the length of a tile's window depends on its start.
        """
        start = self.common_length()
        if not all(isinstance(x, NSACache) and x.written_by_kernels and start >= x.spec.w for x in self.layers):
            return start
        return DeviceStart(self.max_len - tokens, self.positions_B)

    @property
    def steps_on_device(self) -> bool:
        """Whether a step reads nothing back to the host, so that a CUDA graph can capture it."""
        return self.positions_B.is_cuda and all(
            use_kernels(layer.selected_BT2GD) for layer in self.layers if isinstance(layer, NSACache)
        )

    def row(self, index: int) -> Cache:
        """Return a view of one sequence; writes to it are writes to this cache."""
        one, rows = copy.copy(self), slice(index, index + 1)
        one.layers = [layer.row(index) for layer in self.layers]
        one.lengths_B, one.positions_B = self.lengths_B[rows], self.positions_B[rows]
        return one

    def copy_from(self, other: Cache, rows_B: Tensor) -> None:
        """Let sequence `i` continue as sequence `rows_B[i]` of this cache, or of a smaller one of the same layers."""
        self.lengths_B.copy_(other.lengths_B[rows_B.cpu()])
        self.positions_B.copy_(other.positions_B[rows_B])
        for layer, source in zip(self.layers, other.layers, strict=True):
            for tensor, rows in zip(layer.tensors(), source.tensors(), strict=True):
                tensor[:, : rows.shape[1]] = rows[rows_B]

    def reset(self) -> None:
        """Empty the cache. Kernels load rows beyond the newest with weight 0, so those must be finite."""
        self.lengths_B.zero_()
        self.positions_B.zero_()
        for layer in self.layers:
            for tensor in layer.tensors():
                tensor.zero_()

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors())


def _rows(positions_B: Tensor) -> Tensor:
    return torch.arange(len(positions_B), device=positions_B.device)
