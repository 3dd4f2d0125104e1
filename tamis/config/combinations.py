"""Combinations of keys that cannot be trained, although each key is valid. No torch."""

from __future__ import annotations

from tamis.config.schema import LOCAL, MOST_TOKENS_PER_STEP, Config
from tamis.config.vocabulary import VOCABULARY


def impossible_combinations(config: Config) -> list[str]:
    """A sentence for each combination of keys that cannot be trained."""
    model, nsa, data, runtime = config.model, config.nsa, config.data, config.runtime
    checks = [
        (
            model.n_heads % model.n_kv_groups,
            f"model.n_heads must be a multiple of model.n_kv_groups, got {model.n_heads} and {model.n_kv_groups}",
        ),
        (model.d_k % 2, f"model.d_k must be even for rotary positions, got {model.d_k}"),
        (nsa.l % nsa.d, f"nsa.l must be a multiple of nsa.d, got l={nsa.l} and d={nsa.d}"),
        (nsa.l_sel % nsa.d, f"nsa.l_sel must be a multiple of nsa.d, got l_sel={nsa.l_sel} and d={nsa.d}"),
        (
            not 1 <= len([nsa.layers] if isinstance(nsa.layers, str) else nsa.layers) <= model.n_layers,
            f"nsa.layers must list 1 to model.n_layers={model.n_layers} layers, got {len(nsa.layers)}",
        ),
        (
            data.dataset in (*LOCAL, "shards") and not data.local_path,
            f"data.local_path must be set when data.dataset is {data.dataset}",
        ),
        (
            (data.dataset == "mixture") != bool(data.mixture),
            "data.mixture must name sources and weights if data.dataset is mixture, and be null otherwise",
        ),
        (
            data.vocab_size not in (None, VOCABULARY.get(data.tokenizer, data.vocab_size)),
            f"data.vocab_size must be null or {VOCABULARY.get(data.tokenizer)} when data.tokenizer is {data.tokenizer}",
        ),
        (
            runtime.production and data.synthetic_on_fail,
            "data.synthetic_on_fail must be false when runtime.production is true",
        ),
        (
            runtime.sdpa == "flash_only" and not runtime.use_flash,
            "runtime.sdpa: flash_only needs runtime.use_flash: true",
        ),
        (
            config.train.optimizer == "muon" and runtime.precision == "fp16",
            "train.optimizer: muon needs runtime.precision: bf16 or fp32",
        ),
        (
            not _rises_to(config.train.length_schedule, config.train.seq_len),
            f"train.length_schedule must list lengths that never fall, divide train.seq_len={config.train.seq_len} "
            f"and end with it, got {config.train.length_schedule}",
        ),
        (
            config.cost.max is not None and not config.cost.per_hour,
            "cost.max needs cost.per_hour: the price of the machine per hour",
        ),
        (
            config.tokens_per_step(1) > MOST_TOKENS_PER_STEP,
            f"train.batch_size · train.accumulate_grad_batches · train.seq_len must be at most "
            f"{MOST_TOKENS_PER_STEP:,} tokens, got {config.tokens_per_step(1):,}",
        ),
    ]
    return [message for is_broken, message in checks if is_broken]


def _rises_to(lengths: list[int], longest: int) -> bool:
    divide = all(length > 0 and longest % length == 0 for length in lengths)
    return not lengths or (lengths == sorted(lengths) and lengths[-1] == longest and divide)
