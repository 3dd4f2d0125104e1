"""The geometry of Native Sparse Attention: block sizes, and which blocks exist, overlap and are visible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

FORCED_BLOCKS = 3  # block 0 and the two newest, always chosen


@dataclass(frozen=True)
class NSASpec:
    """Block sizes in tokens and block counts; the keys carry the names the configs use."""

    l: int = 32  # noqa: E741  tokens per compressed block
    d: int = 16  # stride between compressed blocks
    l_sel: int = 64  # tokens per selection block
    n_sel: int = 16  # selection blocks each query attends to
    w: int = 512  # tokens of the sliding window, the query's own included

    def __post_init__(self) -> None:
        for name in ("l", "d", "l_sel", "n_sel", "w"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"nsa.{name} must be a whole number of at least 1, got {value!r}")
        if self.l % self.d:
            raise ValueError(f"nsa.l must be a multiple of nsa.d, got l={self.l}, d={self.d}")
        if self.l_sel % self.d:
            raise ValueError(f"nsa.l_sel must be a multiple of nsa.d, got l_sel={self.l_sel}, d={self.d}")
        if self.n_sel < FORCED_BLOCKS:
            raise ValueError(
                f"nsa.n_sel must be at least {FORCED_BLOCKS}, got {self.n_sel}: block 0 and the two newest always count"
            )

    @classmethod
    def of(cls, section: Any) -> NSASpec:
        """Take the sizes from the `nsa` section of a config."""
        return cls(l=section.l, d=section.d, l_sel=section.l_sel, n_sel=section.n_sel, w=section.w)

    def compressed_blocks(self, tokens: int) -> int:
        """Blocks that lie wholly inside the first `tokens` tokens."""
        return 0 if tokens < self.l else (tokens - self.l) // self.d + 1

    def selection_blocks(self, tokens: int) -> int:
        """Selection blocks that hold at least one of the first `tokens` tokens; the last may be partial."""
        return -(-tokens // self.l_sel)

    def visible_compressed(self, position: int) -> int:
        """Compressed blocks the query at `position` may see: those that end at or before it."""
        return self.compressed_blocks(position + 1)

    def last_token(self, block: int) -> int:
        """Position of the last token of a compressed block; its key is rotated to this position."""
        return block * self.d + self.l - 1

    @property
    def pieces_per_compressed(self) -> int:
        return self.l // self.d

    @property
    def pieces_per_selected(self) -> int:
        return self.l_sel // self.d

    def overlap(self, compressed: int, selected: int) -> int:
        """How many stride-d pieces of a compressed block lie in a selection block."""
        first = max(compressed, selected * self.pieces_per_selected)
        last = min(compressed + self.pieces_per_compressed, (selected + 1) * self.pieces_per_selected)
        return max(0, last - first)

    def reads_per_token(self, context: int) -> int:
        """Keys a query at the end of `context` tokens reads: compressed, selected and window, by formula."""
        return self.compressed_blocks(context) + min(self.n_sel * self.l_sel, context) + min(self.w, context)


def as_numbers(spec: NSASpec) -> list[int]:
    """The spec as an operation takes it: `NSASpec(*numbers)` is the inverse."""
    return [spec.l, spec.d, spec.l_sel, spec.n_sel, spec.w]


@dataclass(frozen=True)
class DeviceStart:
    """The position of a tile's first query, read by the kernels from the device.

    A captured CUDA graph launches its kernels with the same numbers at every replay. To walk a prompt tile by tile they
    must read the position themselves.
    """

    latest: int  # the largest position possible: the host sizes its allocations by it
    where: Tensor  # one whole number on the device


Start = int | DeviceStart


def latest_start(start: Start) -> int:
    return start.latest if isinstance(start, DeviceStart) else start
