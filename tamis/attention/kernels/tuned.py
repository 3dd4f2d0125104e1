"""Which tile a kernel takes on the present GPU: the one `tamis tune` stored for this model, else that of the tables.

The file is read once per process and never needed: a missing one is usual, and one that is damaged, of other kernels or
of another Triton is ignored with a warning. Only tiles of `tiles.candidates` are taken from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton

from tamis.attention.kernels.tiles import AnyTile, Family, candidates, family_of, shipped_tile

FORMAT = 1
Result = TypeVar("Result")


@dataclass(frozen=True)
class GpuModel:
    """What tiles are stored for."""

    name: str
    capability: tuple[int, int]

    @property
    def key(self) -> str:
        return f"{self.name}, sm_{self.capability[0]}{self.capability[1]}, triton {triton.__version__}"

    @property
    def family(self) -> Family:
        return family_of(self.capability)


assumed: GpuModel | None = None  # the GPU that a process without one compiles for
_given: dict[str, AnyTile] = {}  # tiles that replace all others while `using` runs
_is_in_use = _is_refused = False  # stored tiles, since one was taken; since a launch failed with them
generation = 0  # of tiles: what was worked out with those of another one counts no more


def tiles_file() -> Path | None:
    """Where tiles are stored: $TAMIS_TILES, else in the user's cache folder; None if the variable is `off`."""
    if (chosen := os.environ.get("TAMIS_TILES")) == "off":
        return None
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(chosen) if chosen else Path(folder) / "tamis/tiles.json"


def shape_key(dtype: torch.dtype, heads_per_group: int, dim: int) -> str:
    """The name of a shape in the file: dtype, heads per group and padded head dim."""
    return f"{str(dtype).removeprefix('torch.')}:{heads_per_group}:{dim}"


@cache
def kernel_digest() -> str:
    """A checksum of the kernels' sources: tiles that were measured with others are stale."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def read_tiles(path: Path, gpu: GpuModel) -> dict[str, dict[str, AnyTile]]:
    """The tiles stored for a GPU model, by shape and kernel; none, with a warning, if the file cannot be used."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']!r}, not {FORMAT}")
        entry = document["gpus"].get(gpu.key)
        if entry is None:
            return {}
        if entry["kernels"] != kernel_digest():
            raise ValueError("its tiles were measured with other kernels")
        return {shape: _known_tiles(shape, tiles, gpu.family) for shape, tiles in entry["shapes"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        warnings.warn(f"{path} is ignored: {reason}; run `tamis tune`, or delete it", stacklevel=2)
        return {}


def _known_tiles(shape: str, stored: Mapping[str, Any], family: Family) -> dict[str, AnyTile]:
    dtype, _, dim = shape.split(":")
    tiles = {}
    for kernel, fields in stored.items():
        known = [tile for tile in candidates(kernel, family, getattr(torch, dtype), int(dim)) if asdict(tile) == fields]
        if not known:
            raise ValueError(f"{fields} is no tile that `tamis tune` offers for {kernel}")
        tiles[kernel] = known[0]
    return tiles


def write_tiles(path: Path, gpu: GpuModel, shape: str, tiles: Mapping[str, AnyTile]) -> None:
    """Store the tiles of one shape; those of other shapes and GPU models stay if they can still be used."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        entries = dict(document["gpus"]) if document["format"] == FORMAT else {}
    except (OSError, ValueError, KeyError, TypeError):
        entries = {}
    with warnings.catch_warnings(action="ignore"):
        kept = read_tiles(path, gpu)
    shapes = {
        of: {kernel: asdict(tile) for kernel, tile in each.items()} for of, each in (kept | {shape: tiles}).items()
    }
    entries[gpu.key] = {"kernels": kernel_digest(), "shapes": shapes}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps({"format": FORMAT, "gpus": entries}, indent=1), encoding="utf-8")
    temporary.replace(path)


@cache
def gpu_model(device: torch.device) -> GpuModel | None:
    """The model of a CUDA device; None for other devices, unless this process compiles for a GPU it lacks."""
    if device.type != "cuda":
        return assumed
    return GpuModel(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


@cache
def _stored(gpu: GpuModel) -> dict[str, dict[str, AnyTile]]:
    path = None if _is_refused else tiles_file()
    return {} if path is None else read_tiles(path, gpu)


@cache
def chosen_tile(kernel: str, device: torch.device, dtype: torch.dtype, dim: int, heads_per_group: int) -> AnyTile:
    """The tile for tensors on a device; `dim` is padded to a power of two. Devices that are no GPU count as Hopper."""
    global _is_in_use
    if kernel in _given:
        return _given[kernel]
    gpu = gpu_model(device)
    stored = _stored(gpu) if gpu else {}
    tile = stored.get(shape_key(dtype, heads_per_group, dim), {}).get(kernel)
    _is_in_use = _is_in_use or tile is not None
    return tile or shipped_tile(kernel, gpu.family if gpu else "hopper", dtype, dim)


def file_in_use(device: torch.device, dtype: torch.dtype, dim: int, heads_per_group: int) -> Path | None:
    """The file that a shape's tiles come from; None if all are shipped ones. `dim` is padded to a power of two."""
    gpu = gpu_model(device)
    return tiles_file() if gpu and _stored(gpu).get(shape_key(dtype, heads_per_group, dim)) else None


@contextmanager
def using(tiles: Mapping[str, AnyTile]) -> Iterator[None]:
    """Launch these kernels with these tiles."""
    global _given
    before, _given = _given, {**_given, **tiles}
    _choose_again()
    try:
        yield
    finally:
        _given = before
        _choose_again()


def _choose_again() -> None:
    global generation
    generation += 1
    chosen_tile.cache_clear()


def with_fallback(call: Callable[[], Result]) -> Result:
    """Call, and if that fails while a stored tile is in use, drop them all with a warning and call again."""
    global _is_in_use, _is_refused
    try:
        return call()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if not _is_in_use:
            raise
        _is_in_use, _is_refused = False, True
        warnings.warn(f"{tiles_file()} is ignored, because a kernel failed with its tiles: {error}", stacklevel=2)
        _stored.cache_clear()
        _choose_again()
    return call()
