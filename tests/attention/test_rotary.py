"""Rotary positions against their definition, and the kernel that splits and rotates heads against plain PyTorch."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.devices import DEVICE

# After devices, which sets up the interpreter.
from tamis.attention.kernels import split_heads as kernels  # isort: skip
from tamis.attention.rotary import Rotary, _split_heads, split_heads  # isort: skip

DIM, LENGTH = 16, 4096
PARTS = [
    ([4, 2, 2], [True, True, False]),
    ([6, 1, 1, 1, 1, 1, 1], [True, False, False, True, False, True, False]),
    ([1], [False]),
]


class Launches:
    """A kernel that keeps the constants of its launches."""

    def __init__(self, kernel: Any, constants: list[dict[str, Any]]) -> None:
        self.kernel, self.constants = kernel, constants

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            self.constants.append(constants)
            self.kernel[grid](*arguments, **constants)

        return launch


def problem(batch: int, length: int, dim: int, sizes: list[int]) -> tuple[Tensor, Rotary]:
    generator = torch.Generator().manual_seed(length * 7 + dim)
    merged = torch.randn(batch, length, sum(sizes), dim, generator=generator).to(DEVICE).requires_grad_()
    return merged, Rotary(dim, base=10000.0, scale=1.0, length=length + 3).to(DEVICE)


def plain(merged: Tensor, rotary: Rotary, sizes: list[int], rotated: list[bool]) -> list[Tensor]:
    positions = torch.arange(merged.shape[1], device=merged.device)
    parts = merged.split(sizes, dim=2)
    return [rotary(part, positions) if is_rotated else part for part, is_rotated in zip(parts, rotated, strict=True)]


@pytest.mark.parametrize(("sizes", "rotated"), PARTS, ids=str)
@pytest.mark.parametrize(("batch", "length", "dim"), [(2, 7, 16), (1, 33, 12), (3, 1, 2)])
def test_kernel_equals_pytorch_in_value_and_gradient(
    batch: int, length: int, dim: int, sizes: list[int], rotated: list[bool]
) -> None:
    merged, rotary = problem(batch, length, dim, sizes)
    measured = _split_heads(merged, rotary.cos, rotary.sin, sizes, rotated, 0)
    expected = plain(merged, rotary, sizes, rotated)
    assert all(part.is_contiguous() for part in measured)
    torch.testing.assert_close(list(measured), expected, rtol=1e-6, atol=1e-6)
    seeds = [torch.randn_like(part) for part in expected]
    got, wanted = (torch.autograd.grad(parts, merged, seeds) for parts in (measured, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def test_the_second_part_may_come_in_pieces() -> None:
    sizes, rotated, piece = [3, 4, 2], [True, False, True], 4
    merged, rotary = problem(2, 12, 16, sizes)
    measured, plain_parts = (
        split(merged, rotary.cos, rotary.sin, sizes, rotated, piece) for split in (_split_heads, split_heads)
    )
    expected = plain(merged, rotary, sizes, rotated)
    kv = expected[1].view(2, 3, piece, 2, 2, 16)  # batch, pieces, tokens, key or value, groups
    expected[1] = torch.stack([kv[:, :, :, m].transpose(2, 3) for m in range(2)])
    seeds = [torch.randn_like(part) for part in expected]
    for parts in (measured, plain_parts):
        torch.testing.assert_close(list(parts), expected, rtol=1e-6, atol=1e-6)
        got, wanted = (torch.autograd.grad(x, merged, seeds, retain_graph=True) for x in (parts, expected))
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    assert all(part.is_contiguous() for part in measured)


@pytest.mark.parametrize(("dim", "offset", "bytes_"), [(16, 0, 16), (16, 1, 4), (16, 2, 8), (2, 0, 8)])
def test_gradients_may_begin_anywhere_and_the_compiler_is_given_their_true_alignment(
    dim: int, offset: int, bytes_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, rotated = PARTS[0]
    merged, rotary = problem(1, 9, dim, sizes)
    parts = plain(merged, rotary, sizes, rotated)
    seeds = [torch.randn(part.numel() + offset, device=DEVICE)[offset:].view_as(part) for part in parts]
    launches: list[dict[str, Any]] = []
    monkeypatch.setattr(kernels, "_join_kernel", Launches(kernels._join_kernel, launches))
    joined = kernels.join_heads_rows(seeds, rotary.cos, rotary.sin, sizes, rotated)
    torch.testing.assert_close(joined, torch.autograd.grad(parts, merged, seeds)[0], rtol=1e-6, atol=1e-6)
    assert [launch["ALIGNED"] for launch in launches] == [bytes_]


def test_the_plain_path_gives_the_same_parts() -> None:
    merged, rotary = problem(2, 9, 8, [3, 1])
    parts = split_heads(merged, rotary.cos, rotary.sin, [3, 1], [True, False])
    torch.testing.assert_close(parts, plain(merged, rotary, [3, 1], [True, False]), rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def rotary() -> Rotary:
    return Rotary(DIM, base=10000.0, scale=1.0, length=LENGTH)


def rotated(rotary: Rotary, x: Tensor, position: int) -> Tensor:
    return rotary(x.view(1, 1, 1, DIM), torch.tensor([position])).flatten()


def test_scores_depend_only_on_distance(rotary: Rotary) -> None:
    q, k = torch.randn(2, DIM, generator=torch.Generator().manual_seed(0))
    for distance in (0, 1, 7, 100, 1000):
        scores = [rotated(rotary, q, s + distance) @ rotated(rotary, k, s) for s in (0, 1, 63, 500, 3000)]
        torch.testing.assert_close(torch.stack(scores), scores[0].expand(5), rtol=0, atol=1e-5)
    near, far = (rotated(rotary, q, s) @ rotated(rotary, k, 0) for s in (1, 100))
    assert abs(near - far) > 1e-2  # and they do depend on it


def test_every_head_is_rotated_by_the_same_angles(rotary: Rotary) -> None:
    head = torch.randn(1, 5, 1, DIM)
    positions = torch.tensor([3, 9, 0, 77, 4000])
    all_heads = rotary(head.expand(1, 5, 6, DIM), positions)
    assert torch.equal(all_heads, rotary(head, positions).expand(1, 5, 6, DIM))


def test_heads_do_not_mix(rotary: Rotary) -> None:
    x, positions = torch.randn(2, 5, 3, DIM), torch.tensor([3, 9, 0, 77, 4000])
    alone = [rotary(x[:, :, h : h + 1], positions) for h in range(3)]
    assert torch.equal(rotary(x, positions), torch.cat(alone, dim=2))


def test_pairs_are_rotated_by_position_times_frequency(rotary: Rotary) -> None:
    x = torch.randn(DIM, dtype=torch.float64)
    expected = torch.empty_like(x)
    for i in range(DIM // 2):
        angle = 1234 * 10000.0 ** (-2 * i / DIM)
        a, b = x[i].item(), x[i + DIM // 2].item()
        expected[i] = a * math.cos(angle) - b * math.sin(angle)
        expected[i + DIM // 2] = b * math.cos(angle) + a * math.sin(angle)
    torch.testing.assert_close(rotated(rotary, x.float(), 1234), expected.float(), rtol=0, atol=1e-6)


def test_angles_are_exact_at_a_million_tokens() -> None:
    rotary = Rotary(4, base=10000.0, scale=1.0, length=1_000_000)
    assert rotary.cos[999_999, 0].item() == pytest.approx(math.cos(999_999), abs=1e-6)
    assert rotary.sin[999_999, 1].item() == pytest.approx(math.sin(999_999 / 100), abs=1e-6)


def test_the_scale_divides_positions(rotary: Rotary) -> None:
    scaled = Rotary(DIM, base=10000.0, scale=8.0, length=LENGTH)
    assert torch.equal(scaled.cos[::8], rotary.cos[: LENGTH // 8])
