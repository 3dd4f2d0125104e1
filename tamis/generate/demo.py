"""The long-context demonstration: a prompt read by tiles through the caches, then decoded, with NSA and with dense.

Every figure is measured in this run. The weights are a checkpoint's or fresh, as printed; timings do not depend on it.
"""

from __future__ import annotations

import json
import resource
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from tamis.attention import NSASpec
from tamis.attention.cache import Cache, NSACache
from tamis.attention.decode import reads
from tamis.attention.functional import describe
from tamis.config import Config, build_config, load_config
from tamis.generate.load import device_for, load_model, precision_for, to_inference
from tamis.generate.sample import DecodeStep, TileReader
from tamis.model import Decoder
from tamis.run.files.records import optional_write

REPORTS = Path("artifacts/test-reports")


@dataclass(frozen=True)
class DemoResult:
    """One model's figures. Reads are keys per layer and group, for the prompt's last token and the last decoded."""

    attention: str
    warm_up_s: float
    prefill_ms_by_tile: list[float]
    prefill_s: float
    prefill_tokens_per_s: float
    decode_ms: float
    reads_total: int
    reads_formula: int
    reads_last_step: int
    cache_mib: float
    peak_memory_mib: float


def demo_64k(
    S: int = 65536,
    prefill_tile: int = 4096,
    rope_scale: float = 1.0,
    use_fa2: bool = True,
    decode_tokens: int = 32,
    checkpoint: str | None = None,
    config: str | None = None,
    overrides: list[str] | None = None,
    device: str = "auto",
    precision: str | None = None,
    seed: int = 1337,
) -> list[DemoResult]:
    """Prefill and decode with the NSA model, then its dense twin; print (JSON last) and store the figures."""
    for name, value in (("S", S), ("prefill_tile", prefill_tile), ("decode_tokens", decode_tokens)):
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    target = device_for(device)
    dtype = precision_for(target, precision)
    torch.backends.cuda.enable_flash_sdp(use_fa2)  # for the dense twin; NSA has its own kernels
    model, origin = _nsa_model(checkpoint, config, overrides, rope_scale, S + decode_tokens, target, dtype, seed)
    count = sum(p.numel() for p in model.parameters())
    print(f"model: {model.config.model.name}, {len(model.blocks)} layers, {count:,} parameters, {origin}")
    shape = f"{S} tokens in tiles of {prefill_tile}, then {decode_tokens}"
    print(f"{shape}; rope_scale {rope_scale:g}; {dtype} on {target}")
    print(describe(target, dtype, model.config.model.d_k), flush=True)
    tokens = torch.randint(model.config.vocab_size, (1, S), generator=torch.Generator().manual_seed(seed)).to(target)
    results = [measure_prefill_and_decode(model, tokens, prefill_tile, decode_tokens)]
    twin_config = _changed(model.config, attention="dense")
    del model
    twin = _fresh(twin_config, S + decode_tokens, target, dtype, seed)
    results.append(measure_prefill_and_decode(twin, tokens, prefill_tile, decode_tokens))
    _print_table(results)
    figures = {"S": S, "prefill_tile": prefill_tile, "rope_scale": rope_scale, "device": _device_name(target),
               "dtype": str(dtype), "weights": origin, "models": [asdict(r) for r in results]}  # fmt: skip
    log = REPORTS / f"long_context_{time.strftime('%Y%m%d_%H%M%S')}.log"
    with optional_write():
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        print(f"log: {log}")
    print(json.dumps(figures))
    return results


def measure_prefill_and_decode(model: Decoder, tokens_1S: Tensor, tile: int, decode_tokens: int) -> DemoResult:
    """Read the prompt by tiles, then decode greedily."""
    name, device = model.config.model.attention, tokens_1S.device
    cache = model.new_cache(1, tokens_1S.shape[1] + decode_tokens)
    read, step = TileReader(model, cache), DecodeStep(model, cache)
    warm_up_s = _warm_up(read, step, tokens_1S, tile) if device.type == "cuda" else 0.0
    tiles_ms, hidden = [], torch.empty(0)
    for number, part in enumerate(tokens_1S.split(tile, dim=1), 1):
        started = _now(device)
        hidden = read(part)
        tiles_ms.append((_now(device) - started) * 1e3)
        print(f"{name}: tile {number}, {part.shape[1]} tokens: {tiles_ms[-1]:.1f} ms", flush=True)
    counted, formula = reads_of_prompt(model, cache)
    steps_ms = []
    for _ in range(decode_tokens):
        token = model.logits(hidden).argmax(-1)
        started = _now(device)
        hidden = step(token)
        steps_ms.append((_now(device) - started) * 1e3)
    prefill_s = sum(tiles_ms) / 1e3
    return DemoResult(
        attention=name,
        warm_up_s=round(warm_up_s, 2),
        prefill_ms_by_tile=[round(ms, 3) for ms in tiles_ms],
        prefill_s=round(prefill_s, 4),
        prefill_tokens_per_s=round(tokens_1S.shape[1] / prefill_s, 1),
        decode_ms=round(statistics.median(steps_ms), 4),
        reads_total=counted,
        reads_formula=formula,
        reads_last_step=reads_of_last_step(cache),
        cache_mib=round(cache.bytes / 2**20, 2),
        peak_memory_mib=round(_peak_memory(device) / 2**20, 1),
    )


def _warm_up(read: TileReader, step: DecodeStep, tokens_1S: Tensor, tile: int) -> float:
    """Run a whole prefill and a step to compile kernels and capture graphs; return the seconds it took."""
    torch.cuda.reset_peak_memory_stats()
    started = _now(tokens_1S.device)
    for part in tokens_1S.split(tile, dim=1):
        read(part)
    step(tokens_1S[:, 0])
    seconds = _now(tokens_1S.device) - started
    read.cache.reset()
    print(f"{read.model.config.model.attention}: warmed up in {seconds:.2f} s, compiling included", flush=True)
    return seconds


def reads_of_prompt(model: Decoder, cache: Cache) -> tuple[int, int]:
    """Return the keys read for the prompt's last token, counted from the blocks it chose, and by formula."""
    spec, context = NSASpec.of(model.config.nsa), int(cache.lengths_B[0])
    position = torch.tensor([context - 1])
    counts = [reads(layer.chosen_BGn.cpu(), position, spec) for layer in cache.layers if isinstance(layer, NSACache)]
    return (_common_count(counts), spec.reads_per_token(context)) if counts else (context, context)


def reads_of_last_step(cache: Cache) -> int:
    """Return the keys read for the last token, as the decode kernel counted them."""
    counts = [layer.reads_BG for layer in cache.layers if isinstance(layer, NSACache)]
    return _common_count(counts) if counts else int(cache.lengths_B[0])


def _common_count(counts: list[Tensor]) -> int:
    found = {int(n) for count in counts for n in count.flatten().tolist()}
    if len(found) != 1:
        raise RuntimeError(f"layers and groups read different numbers of keys for one token: {sorted(found)}")
    return found.pop()


def _nsa_model(
    checkpoint: str | None,
    config: str | None,
    overrides: list[str] | None,
    rope_scale: float,
    max_len: int,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
) -> tuple[Decoder, str]:
    """Return the model and the origin of its weights."""
    if checkpoint is None:
        chosen = _changed(load_config(config, overrides), attention="nsa", rope_scale=float(rope_scale))
        return _fresh(chosen, max_len, device, dtype, seed), "freshly initialised: its text means nothing"
    if config or overrides:
        raise ValueError("--checkpoint brings its own config: leave --config and overrides out")
    loaded = load_model(Path(checkpoint), max_len=max_len, rope_scale=rope_scale, device=device.type)
    if loaded.config.model.attention != "nsa":
        raise ValueError(f"{checkpoint} holds a dense model: give an NSA one, its dense twin is made here")
    to_inference(loaded.model, device, dtype)
    return loaded.model, f"weights of {loaded.source}, step {loaded.step}"


def _fresh(config: Config, max_len: int, device: torch.device, dtype: torch.dtype, seed: int) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(config, max_len=max_len)
    to_inference(model, device, dtype)
    return model


def _changed(config: Config, **model_keys: object) -> Config:
    tree = config.model_dump()
    tree["model"].update(model_keys)
    return build_config(tree)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _peak_memory(device: torch.device) -> int:
    """Return the GPU's peak since the warm-up began; on a CPU, the process's peak so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _print_table(results: list[DemoResult]) -> None:
    titles = ("prefill s", "tok/s", "decode ms", "reads_total", "cache MiB", "peak MiB")
    print(" " * 6 + "".join(f"{title:>12}" for title in titles))
    for r in results:
        speed = f"{r.prefill_s:12.3f}{r.prefill_tokens_per_s:12.0f}{r.decode_ms:12.3f}"
        print(f"{r.attention:6}{speed}{r.reads_total:12d}{r.cache_mib:12.1f}{r.peak_memory_mib:12.0f}")
    nsa = results[0]
    print(
        f"reads_total={nsa.reads_total} keys per layer and group for the prompt's last token, counted from the blocks "
        f"it chose (formula: {nsa.reads_formula}); {nsa.reads_last_step} for the last token decoded"
    )
