"""What a model remembers of the tokens it has read, allocated once and never concatenated.

An NSA layer keeps every key and value for selection, a ring of the window's, the compressed ones (one every `d` tokens)
and the newest `l` before compression, unrotated, which make the next block. The dense twin keeps every key and value.

Shapes: B batch, T capacity in tokens, N compressed blocks, G groups, D head dim, 2: key, then value.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from tamis.attention import NSASpec
from tamis.attention.decode import use_kernels
from tamis.config import Config

WIDEST_COMPRESSED = 256  # bytes of a head: wider ones do not fit the kernel that compresses


class Ring:
    """Keys and values of the newest `size` tokens; token `t` lies in slot `t % size`."""

    def __init__(self, slots_BW2GD: Tensor) -> None:
        self.slots_BW2GD = slots_BW2GD

    @property
    def size(self) -> int:
        return self.slots_BW2GD.shape[1]

    def newest(self, count: int, end: int) -> Tensor:
        """The `count` tokens before position `end`, oldest first."""
        parts = [self.slots_BW2GD[:, part] for part in self._slots(count, end)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def newest_of_each(self, positions_B: Tensor) -> Tensor:
        """All `size` tokens up to each sequence's position; slots never written hold zeros."""
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
        """Where the `count` tokens before `end` lie, oldest first: at most two runs."""
        begin = (end - count) % self.size
        first = min(count, self.size - begin)
        return [slice(begin, begin + first)] + ([slice(0, count - first)] if count > first else [])


class NSACache:
    """One layer's memory, and what its newest query chose and read."""

    def __init__(self, config: Config, batch: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        nsa, model = config.nsa, config.model
        self.spec = NSASpec.of(nsa)
        self.max_blocks = self.spec.compressed_blocks(max_len)
        self.compressed_by_kernels = nsa.phi == "mlp" and model.d_k * dtype.itemsize <= WIDEST_COMPRESSED

        def allocate(tokens: int) -> Tensor:
            return torch.zeros(batch, tokens, 2, model.n_kv_groups, model.d_k, dtype=dtype, device=device)

        self.selected_BT2GD = allocate(max_len)
        # One row more than there can be blocks: a step that completes none writes there, so that it need not branch.
        self.compressed_BN2GD = allocate(self.max_blocks + 1)
        self.window = Ring(allocate(min(nsa.w, max_len)))
        self.tail = Ring(allocate(nsa.l))
        self.chosen_BGn = torch.full((batch, model.n_kv_groups, nsa.n_sel), -1, dtype=torch.int32, device=device)
        self.reads_BG = torch.zeros(batch, model.n_kv_groups, dtype=torch.int32, device=device)  # by the last step

    @property
    def written_by_kernels(self) -> bool:
        return self.compressed_by_kernels and use_kernels(self.selected_BT2GD)

    def write_block(self, new_B2GD: Tensor, positions_B: Tensor) -> None:
        """Keep the block that ends at each sequence's position, if one does."""
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


class DenseCache:
    """One layer's memory of the dense twin."""

    def __init__(self, config: Config, batch: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (batch, max_len, 2, config.model.n_kv_groups, config.model.d_k)
        self.kept_BT2GD = torch.zeros(shape, dtype=dtype, device=device)

    def write_one(self, new_B2GD: Tensor, positions_B: Tensor) -> None:
        self.kept_BT2GD[_rows(positions_B), positions_B] = new_B2GD

    def row(self, index: int) -> DenseCache:
        one = copy.copy(self)
        one.kept_BT2GD = self.kept_BT2GD[index : index + 1]
        return one

    def tensors(self) -> list[Tensor]:
        return [self.kept_BT2GD]


class Cache:
    """The memory of a whole decoder for `batch` sequences of up to `max_len` tokens each, of any lengths."""

    def __init__(
        self,
        config: Config,
        batch: int,
        max_len: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if batch < 1 or max_len < 1:
            raise ValueError(f"a cache needs room for at least 1 sequence of 1 token, got {batch} of {max_len}")
        kind = NSACache if config.model.attention == "nsa" else DenseCache
        device = torch.device(device)
        self.max_len = max_len
        self.layers = [kind(config, batch, max_len, dtype, device) for _ in range(config.model.n_layers)]
        self.lengths_B = torch.zeros(batch, dtype=torch.int64)  # on the host, for checks that must not wait for the GPU
        self.positions_B = torch.zeros(batch, dtype=torch.int64, device=device)  # the same numbers, for the kernels

    @property
    def batch(self) -> int:
        return len(self.lengths_B)

    def reserve(self, tokens: int) -> None:
        """Count `tokens` more for every sequence, or refuse; the device's own count is moved by who writes them."""
        longest = int(self.lengths_B.max()) + tokens
        if longest > self.max_len:
            raise ValueError(
                f"{longest} tokens do not fit the cache of {self.max_len}: shorten the prompt, ask for fewer new "
                f"tokens, or build the model with a larger max_len"
            )
        self.lengths_B += tokens

    def common_length(self) -> int:
        """The length all sequences share; a tile can only be added where they do."""
        length = int(self.lengths_B[0])
        if bool((self.lengths_B != length).any()):
            raise ValueError(
                f"sequences of lengths {self.lengths_B.tolist()} cannot be extended together: extend cache.row(i)"
            )
        return length

    def tile_start(self, tokens: int) -> int:
        """Where a tile of so many tokens begins: a DeviceStart where kernels read the prompt and the window is full.

        Before that a tile's window has another length at every start.
        """
        start, layer = self.common_length(), self.layers[0]
        if not (isinstance(layer, NSACache) and layer.written_by_kernels and start >= layer.spec.w):
            return start
        from tamis.attention.kernels.start import DeviceStart  # here, because a machine without a GPU may lack Triton

        return DeviceStart(self.max_len - tokens, self.positions_B)

    def row(self, index: int) -> Cache:
        """A view of one sequence; what is written to it is written here."""
        one, rows = copy.copy(self), slice(index, index + 1)
        one.layers = [layer.row(index) for layer in self.layers]
        one.lengths_B, one.positions_B = self.lengths_B[rows], self.positions_B[rows]
        return one

    def reset(self) -> None:
        """Forget every token. Kernels may load rows beyond the newest, with no weight: they must be finite."""
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
