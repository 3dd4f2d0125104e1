"""Several processes train what one would: the same gradients and losses, whatever the settings of DDP or FSDP."""

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tamis.config import Config
from tamis.data import open_loader
from tamis.model import Decoder
from tamis.train.distributed import Ranks, join, model_config, settings_without_effect
from tamis.train.guards import most_common, weight_sums
from tamis.train.step import TrainStep
from tests.train.processes import run_ranks, tiny_config

GLOBAL_BATCH = 8  # sequences per optimizer step, however many processes share them
PLAIN = "runtime.ddp_static_graph=false"
SETTINGS = {
    "static graph": [],
    "no static graph": [PLAIN],
    "unused parameters": [PLAIN, "runtime.ddp_find_unused=true"],
    "small buckets": ["runtime.ddp_bucket_mb=1"],
    "safe mode": ["runtime.ddp_safe_mode=true", "runtime.ddp_compress=bf16"],
    "gradient checkpointing": ["runtime.gradient_checkpointing=true"],
    "fsdp": ["runtime.parallel=fsdp"],
    "bf16 wire": ["runtime.ddp_compress=bf16"],
    "fp16 wire": ["runtime.ddp_compress=fp16"],
    "fsdp, bf16 wire": ["runtime.parallel=fsdp", "runtime.ddp_compress=bf16"],
}


def settings_for(out: Path, world_size: int, *overrides: str, accumulate: int = 1) -> Config:
    batch = GLOBAL_BATCH // world_size // accumulate
    shape = [f"train.batch_size={batch}", f"train.accumulate_grad_batches={accumulate}"]
    return tiny_config(out, "train.steps=20", *shape, *overrides)


def record(configs: dict[str, Config], out: str) -> None:
    """In each rank: for each configuration, two steps; what the first one's gradient was, and the numbers of both."""
    first = next(iter(configs.values()))
    with join(first) as ranks:
        for name, config in configs.items():
            found = two_steps(config, ranks)
            if ranks.is_main:
                save_file(found, f"{out}/{name}.safetensors")


def two_steps(config: Config, ranks: Ranks) -> dict[str, Tensor]:
    loader = open_loader(config, rank=ranks.rank, world_size=ranks.world_size)
    torch.manual_seed(config.train.seed)
    step = TrainStep(Decoder(model_config(config, ranks)), config, ranks)
    found: dict[str, Tensor] = {}
    block_calls: list[int] = []
    for block in step.decoder.blocks:
        block.register_forward_pre_hook(lambda *_: block_calls.append(1))
    apply = step.optimizer.step

    def spy(number: int, veto: Tensor | None = None) -> Tensor:
        for name, p in step.optimizer.named.items():
            gradient = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            found.setdefault(f"gradient.{name}", gradient.clone())
        return apply(number, veto)

    step.optimizer.step = spy  # type: ignore[method-assign]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        numbers = [step(loader.next().tokens, number) for number in (1, 2)]
    loader.close()
    # The raw events: PyTorch's own tables of them take seconds.
    events = [event.name() for event in profile.profiler.kineto_results.events()]  # type: ignore[union-attr]
    reductions = sum(name.startswith("gloo:") and "reduce" in name for name in events)
    counts = {"reductions": torch.tensor(reductions), "block_calls": torch.tensor(len(block_calls))}
    return {**found, **counts, "loss_and_norm": torch.stack(numbers)[:, [0, -2]]}


def gather_odd_facts(out: str) -> None:
    config = tiny_config(Path(out))
    with join(config) as ranks:
        value = {"rank": ranks.rank, "text": "é" * ranks.rank * 1000, "nothing": None, "pi": 3.141592653589793}
        assert [v["rank"] for v in ranks.gather(value)] == list(range(ranks.world_size))
        assert [len(v["text"]) for v in ranks.gather(value)] == [r * 1000 for r in range(ranks.world_size)]
        assert ranks.gather(None) == [None] * ranks.world_size
        assert ranks.gather(value)[ranks.rank] == value


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        if name.startswith("gradient."):
            difference = torch.linalg.vector_norm(found[name] - expected[name])
            assert difference <= tolerance * torch.linalg.vector_norm(expected[name]), name
    torch.testing.assert_close(found["loss_and_norm"], expected["loss_and_norm"], rtol=tolerance, atol=0.0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    out = tmp_path_factory.mktemp("alone")
    run_ranks(out, 1, record, {"alone": settings_for(out, 1)}, str(out))
    return load_file(out / "alone.safetensors")


def test_two_processes_compute_the_gradient_and_loss_of_one_under_every_setting(
    tmp_path: Path, alone: dict[str, Tensor]
) -> None:
    configs = {name: settings_for(tmp_path, 2, *overrides) for name, overrides in SETTINGS.items()}
    configs["accumulated"] = settings_for(tmp_path, 2, accumulate=4)
    configs["accumulated fsdp"] = settings_for(tmp_path, 2, "runtime.parallel=fsdp", accumulate=4)
    run_ranks(tmp_path, 2, record, configs, str(tmp_path))
    found = {name: load_file(tmp_path / f"{name}.safetensors") for name in configs}
    for name in configs:
        assert_same(found[name], alone, tolerance=2e-2 if "wire" in name else 1e-5)
        gradient = found[name]["gradient.norm.weight"]
        travelled_as_bf16 = torch.equal(gradient.bfloat16().float(), gradient)
        assert travelled_as_bf16 == ("bf16 wire" in name), name
    plain, checkpointed = found["static graph"]["block_calls"], found["gradient checkpointing"]["block_calls"]
    assert checkpointed == 2 * plain > 0, "every block is computed again in the backward pass"
    for accumulated, at_once in [("accumulated", "no static graph"), ("accumulated fsdp", "fsdp")]:
        assert found[accumulated]["reductions"] == found[at_once]["reductions"] > 0, "one reduction per optimizer step"


def test_four_processes_compute_the_gradient_and_loss_of_one(tmp_path: Path, alone: dict[str, Tensor]) -> None:
    configs = {"ddp": settings_for(tmp_path, 4), "fsdp": settings_for(tmp_path, 4, "runtime.parallel=fsdp")}
    run_ranks(tmp_path, 4, record, configs, str(tmp_path))
    for name in configs:
        assert_same(load_file(tmp_path / f"{name}.safetensors"), alone, tolerance=1e-5)


def test_ranks_gather_json_values_of_any_length(tmp_path: Path) -> None:
    run_ranks(tmp_path, 3, gather_odd_facts, str(tmp_path))


@pytest.mark.parametrize(("asked", "disable", "world_size"), [*itertools.product([True, False], [True, False], [1, 2])])
def test_ddp_disable_gc_turns_gradient_checkpointing_off_under_several_processes(
    tmp_path: Path, asked: bool, disable: bool, world_size: int
) -> None:
    overrides = [f"runtime.gradient_checkpointing={asked}", f"runtime.ddp_disable_gc={disable}"]
    config = tiny_config(tmp_path, *(override.lower() for override in overrides))
    built = model_config(config, Ranks(0, world_size, torch.device("cpu")))
    assert built.runtime.gradient_checkpointing == (asked and (world_size == 1 or not disable))
    assert built.train == config.train


def test_settings_that_others_turn_off_are_named(tmp_path: Path) -> None:
    def named(world_size: int, *overrides: str) -> str:
        ranks = Ranks(0, world_size, torch.device("cpu"))
        return "\n".join(settings_without_effect(tiny_config(tmp_path, *overrides), ranks))

    accumulates = "train.accumulate_grad_batches=2"
    assert "static graph is off" in named(2, accumulates)
    assert named(1, accumulates) == named(2) == named(2, accumulates, "runtime.parallel=fsdp") == ""
    off = ["runtime.gradient_checkpointing=true", "runtime.ddp_disable_gc=true"]
    assert "gradient checkpointing is off: runtime.ddp_disable_gc" in named(2, *off) and named(1, *off) == ""


def test_weight_sums_see_a_single_flipped_bit(tmp_path: Path) -> None:
    decoder = Decoder(tiny_config(tmp_path))
    before = weight_sums(decoder)
    with torch.no_grad():
        decoder.norm.weight.view(torch.int32)[3] ^= 1
    after = weight_sums(decoder)
    assert int((before != after).sum()) == 1


def test_with_two_ranks_the_reference_is_rank_0() -> None:
    assert most_common(["a", "b"]) == "a" and most_common(["a", "b", "b"]) == "b"
