"""Tiles from the user's file: used only where they fit this GPU, these kernels and this Triton, and never needed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tamis.attention import NSASpec, functional, nsa_attention
from tamis.attention.agreement import random_inputs, relative_rmse
from tamis.attention.kernels import ahead_of_time, tuned
from tamis.attention.kernels.tiles import SELECTED, SHAPES, RowTile, Tile, candidates, family_of, shipped_tile
from tamis.attention.kernels.tuned import GpuModel, chosen_tile, read_tiles, using, with_fallback, write_tiles

H200 = GpuModel("NVIDIA H200", (9, 0))
L40S = GpuModel("NVIDIA L40S", (8, 9))
CPU = torch.device("cpu")
SHAPE = "bfloat16:6:64"
OTHER = Tile(64, 64, 4, 2)
SMALL_MEMORY_BYTES = 99 << 10


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that a process on an H200 reads."""
    path = tmp_path / "cache/tiles.json"
    monkeypatch.setenv("TAMIS_TILES", str(path))
    monkeypatch.setattr(tuned, "gpu_model", lambda device: H200)
    monkeypatch.setattr(tuned, "_is_in_use", False)
    monkeypatch.setattr(tuned, "_is_refused", False)
    forget()
    yield path
    forget()


def forget() -> None:
    for cached in (tuned._stored, tuned.chosen_tile):
        cached.cache_clear()


def chosen(kernel: str = "forward", heads: int = 6) -> object:
    return chosen_tile(kernel, CPU, torch.bfloat16, 64, heads)


def shipped(kernel: str = "forward") -> object:
    return shipped_tile(kernel, "hopper", torch.bfloat16, 64)


def test_a_stored_tile_serves_its_shape_alone(file: Path) -> None:
    assert chosen() == shipped()
    write_tiles(file, H200, SHAPE, {"forward": OTHER, "union": RowTile(64, 4, 2)})
    forget()
    assert (chosen(), chosen("union")) == (OTHER, RowTile(64, 4, 2))
    assert (chosen("dq"), chosen(heads=16)) == (shipped("dq"), shipped())


def test_the_line_that_names_the_kernels_names_the_file_of_their_tiles(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functional, "capability", lambda device: H200.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: H200.name)
    monkeypatch.setattr("triton.__version__", "3.6.0")
    write_tiles(file, H200, SHAPE, {"forward": OTHER})
    assert functional.describe("cuda", torch.bfloat16, 64, 6).endswith(f"(sm_90), with the tiles of {file}")
    assert functional.describe("cuda", torch.bfloat16, 64, 4).endswith("(sm_90)")
    monkeypatch.setattr("triton.__version__", "3.9.0")
    warned = functional.describe("cuda", torch.bfloat16, 64, 4)
    assert warned.endswith("(sm_90); they were measured with triton 3.6.x, not 3.9.0, and may be slower")


def test_shapes_and_gpu_models_are_stored_next_to_each_other(file: Path) -> None:
    write_tiles(file, H200, SHAPE, {"forward": OTHER})
    write_tiles(file, L40S, SHAPE, {"dkv": Tile(64, 64, 4, 2)})
    write_tiles(file, H200, "bfloat16:16:128", {"pairs": RowTile(32, 4, 2)})
    assert set(read_tiles(file, H200)) == {SHAPE, "bfloat16:16:128"}
    assert read_tiles(file, L40S) == {SHAPE: {"dkv": Tile(64, 64, 4, 2)}}
    assert read_tiles(file, GpuModel("NVIDIA A100", (8, 0))) == {}


def damaged(change: str) -> str:
    document = {"format": 1, "gpus": {H200.key: {"kernels": tuned.kernel_digest(), "shapes": {SHAPE: {}}}}}
    entry = document["gpus"][H200.key]  # type: ignore[index]
    if change == "another format":
        document["format"] = 2
    if change == "other kernels":
        entry["kernels"] = "0"
    if change == "no candidate":
        entry["shapes"][SHAPE] = {"forward": {"rows": 512, "keys": 512, "warps": 32, "stages": 9, "registers": None}}
    if change == "unknown kernel":
        entry["shapes"][SHAPE] = {"backwards": {"rows": 1}}
    if change == "missing key":
        del entry["shapes"]
    return {"no JSON": "{", "a list": "[]", "binary": "\udcff"}.get(change, json.dumps(document))


CHANGES = ["another format", "other kernels", "no candidate", "unknown kernel", "missing key", "no JSON", "a list"]


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_cannot_be_used_is_ignored_with_one_warning(file: Path, change: str) -> None:
    file.parent.mkdir()
    file.write_text(damaged(change))
    with pytest.warns(UserWarning, match=r"tiles\.json is ignored: .*run `tamis tune`") as warned:
        assert [chosen(), chosen("dq")] == [shipped(), shipped("dq")]
    assert len(warned) == 1
    write_tiles(file, H200, SHAPE, {"forward": OTHER})  # and can be replaced
    forget()
    assert chosen() == OTHER


def test_the_variable_turns_stored_tiles_off(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiles(file, H200, SHAPE, {"forward": OTHER})
    monkeypatch.setenv("TAMIS_TILES", "off")
    forget()
    assert chosen() == shipped()


def test_a_launch_that_fails_with_stored_tiles_is_repeated_with_the_shipped_ones(file: Path) -> None:
    write_tiles(file, H200, SHAPE, {"forward": OTHER})

    def launch() -> object:
        if chosen() == OTHER:
            raise RuntimeError("out of resource: shared memory")
        return chosen()

    with pytest.warns(UserWarning, match="is ignored, because a kernel failed with its tiles: out of resource"):
        assert with_fallback(launch) == shipped()
    assert with_fallback(launch) == shipped()


def test_a_launch_that_fails_with_the_shipped_tiles_fails(file: Path) -> None:
    def launch() -> object:
        chosen()
        raise RuntimeError("out of resource")

    with pytest.raises(RuntimeError, match="out of resource"):
        with_fallback(launch)


def test_the_kernels_compute_the_same_with_other_tiles() -> None:
    spec = NSASpec(l=8, d=4, l_sel=16, n_sel=4, w=24)
    inputs = random_inputs("cpu", torch.float32, 2, 1, 16, spec, 90)
    leaves = [x.requires_grad_() for x in inputs]

    def gradients() -> list[Tensor]:
        out = nsa_attention(*leaves, spec, "triton")
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    wide = {"forward": Tile(64, 16, 4, 1), "dq": Tile(16, 64, 4, 1), "dkv": Tile(64, 16, 4, 1)}
    others = wide | {"score": Tile(64, 16, 4, 1), "union": RowTile(64, 4, 1), "backward": RowTile(64, 4, 1)}
    expected = gradients()
    with using(others):
        got = gradients()
    assert max(relative_rmse(a, b) for a, b in zip(got, expected, strict=True)) < 1e-5


@pytest.mark.parametrize("family", ["ampere", "ada", "hopper"])
@pytest.mark.parametrize("dim", [64, 128])
def test_candidates_begin_with_the_shipped_tile_and_keep_clear_of_known_faults(family: str, dim: int) -> None:
    for kernel in SHAPES:
        if kernel.endswith("_copied") and dim == 64 and kernel != "union_copied":
            continue
        if kernel in ("union_copied", "halves") and kernel not in SELECTED[family]:
            continue
        tiles = candidates(kernel, family, torch.bfloat16, dim)  # type: ignore[arg-type]
        assert tiles[0] == shipped_tile(kernel, family, torch.bfloat16, dim)  # type: ignore[arg-type]
        assert len(set(tiles)) == len(tiles) <= 20
        keys = [tile.keys for tile in tiles if isinstance(tile, Tile)]
        assert dim == 64 or max(keys, default=0) <= 64
        assert not kernel.startswith("dkv") or all(64 % n == 0 for n in keys)


def test_gpus_with_little_shared_memory_have_tables_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [family_of(x) for x in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))] == [
        "ampere", "ada", "ada", "hopper", "hopper", "ada",
    ]  # fmt: skip
    monkeypatch.setattr(functional, "capability", lambda device: (8, 9))
    assert functional.why_no_kernels("cuda", torch.bfloat16, 128) is None
    assert "do not fit the shared memory" in str(functional.why_no_kernels("cuda", torch.bfloat16, 192))


COMPILE = """
import torch
from tamis.attention import NSASpec
from tamis.attention.kernels import ahead_of_time as aot
from tamis.attention.kernels.selected.union import union_forward
from tamis.attention.kernels.tuned import GpuModel
from tamis.attention.op import compressed_forward, window_forward

def launch():
    sizes = (2048, 32), (2048, 2), (127, 2)
    q, k, short = (torch.empty(1, *n, 128, dtype=torch.bfloat16, device="meta") for n in sizes)
    ids = torch.empty(1, 2048, 2, 16, dtype=torch.int32, device="meta")
    window_forward(q, k, k, NSASpec(), trusted=True)
    compressed_forward(q, short, short, NSASpec(), trusted=True)
    for _ in range(3):  # launched again, a kernel is compiled already, and is not run
        union_forward(q, k, k, ids, NSASpec())

l40s = GpuModel("NVIDIA L40S", (8, 9))
assert aot.compile_in_processes(l40s, launch, 2)
assert not aot.compile_in_processes(l40s, lambda: 1 / 0, 1)
"""


def test_two_processes_compile_what_differs_on_an_l40s_and_it_fits(tmp_path: Path) -> None:
    """The rest is as on an A100, whose kernels `test_compile` measures."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    run = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    shared = {path: json.loads(path.read_text()).get("shared") for path in tmp_path.rglob("_*.json")}
    compiled = sorted((path.stem, size) for path, size in shared.items() if size is not None)
    assert [name for name, _ in compiled] == ["_forward_kernel"] * 2 + ["_forward_tiles", "_unite_choices"]
    assert all(size <= SMALL_MEMORY_BYTES for _, size in compiled)


def test_a_packed_row_is_launched_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    launched: set[str] = set()

    def record(self: InterpretedFunction, grid: object) -> object:
        return lambda *args, **kwargs: launched.add(self.fn.__name__)

    monkeypatch.setattr(InterpretedFunction, "__getitem__", record)
    ahead_of_time.launch_attention(torch.bfloat16, 12, 2, 64, NSASpec(), 8192, documents=9, longest=4096)
    assert {"_write_tables", "_forward_kernel", "_score_kernel", "backward_items", "_dq_kernel"} <= launched
