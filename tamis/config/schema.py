"""The typed run configuration: strict YAML, dotted overrides, derived values, hash. No torch here.

Every key that a file may hold is a field below; anything else is an error that names the nearest known key.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tamis.config.files import ConfigError as ConfigError
from tamis.config.files import read_value
from tamis.config.files import read_yaml as read_yaml

VOCABULARY = {"gpt2": 50257, "byte": 257}  # end-of-text included: GPT-2's 50256, and 256 after the byte values
VOCABULARY_MULTIPLE = 128  # the output matrix is padded to this for tensor cores; padding is never predicted

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Model(Section):
    name: str = "m7c_125m"  # printed and stored, so that nobody wonders which model runs
    attention: Literal["nsa", "dense"] = "nsa"  # dense: the twin with ordinary causal attention, for comparison
    dim: Positive = 768  # width of the residual stream
    n_layers: Positive = 12
    n_heads: Positive = 12  # query heads
    n_kv_groups: Positive = 2  # key/value heads; each serves n_heads / n_kv_groups query heads
    d_k: Positive = 64  # head dim, of queries, keys and values alike
    d_ff: Positive = 2240  # feed-forward width
    rope_base: PositiveFloat = 10000.0
    rope_scale: PositiveFloat = 1.0  # positions are divided by this, in every branch
    norm_eps: PositiveFloat = 1e-5


class Nsa(Section):
    l: Positive = 32  # noqa: E741  tokens per compressed block
    d: Positive = 16  # stride between compressed blocks
    l_sel: Positive = 64  # tokens per selection block
    n_sel: Annotated[int, Field(ge=3)] = 16  # blocks each query attends to, block 0 and the two newest included
    w: Positive = 512  # sliding window in tokens
    phi: Literal["mlp", "avg"] = "mlp"  # how a block is compressed: learned, or the mean


class Data(Section):
    dataset: Literal["fineweb_edu", "fineweb_edu_local", "shards", "sample", "synthetic"] = "fineweb_edu"
    tokenizer: Literal["gpt2", "byte"] = "gpt2"
    local_path: str | None = None  # parquet, JSONL or text files, or a folder of them; or a folder of token shards
    hub_name: str = "HuggingFaceFW/fineweb-edu"
    hub_subset: str = "sample-10BT"
    hub_revision: str | None = None  # commit or tag of the dataset; null: its newest
    text_column: str = "text"
    val_fraction: Fraction = 0.005  # share of documents held out by hash, never trained on
    epochs: Positive | None = 1  # passes over the data before its end is an error; null: without end
    loader_timeout_s: PositiveFloat = 120.0  # longest wait for one batch
    prefetch_batches: Positive = 8  # batches prepared ahead in the background
    lanes: Positive = 24  # streams are split into this many lanes; a multiple of every world size used
    on_bad_record: Literal["stop", "skip"] = "stop"  # unreadable record: stop with its place, or count it and go on
    synthetic_on_fail: bool = False  # replace failing data by noise, and brand the run; never in production


class Runtime(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"  # of the computation; master weights are always fp32
    compile: bool = True  # torch.compile the step; only on a GPU
    cuda_graph: bool = (
        True  # one GPU: replay forward and backward as a CUDA graph, which spares small batches the launches
    )
    deterministic: bool = False  # bit-identical repeats on GPU, at some cost in speed
    gradient_checkpointing: bool = False  # recompute activations in backward: less memory, about a third slower
    production: bool = False  # refuses whatever would make the result doubtful (substituted data, say)
    use_flash: bool = True  # dense twin: allow PyTorch's flash attention
    sdpa: Literal["auto", "no_flash", "flash_only"] = "auto"  # dense twin: which of PyTorch's attention kernels
    sdpa_audit: bool = False  # print once which attention kernels PyTorch could choose from
    parallel: Literal["ddp", "fsdp"] = "ddp"
    ddp_bucket_mb: Positive = 25
    ddp_static_graph: bool = True
    ddp_find_unused: bool = False
    ddp_compress: Literal["none", "bf16", "fp16"] = "none"  # dtype of gradients on the wire
    ddp_safe_mode: bool = False  # plainest settings: no static graph, no compression, no compile
    ddp_disable_gc: bool = True  # several processes: gradient checkpointing stays off
    weight_check_every: NotNegative = 500  # steps between checks that all ranks hold the same weights; 0: never
    scaler_init_scale: PositiveFloat = 65536.0  # the four settings of fp16 loss scaling
    scaler_growth_interval: Positive = 2000
    scaler_growth_factor: PositiveFloat = 2.0
    scaler_backoff_factor: PositiveFloat = 0.5
    nvtx: bool = False  # NVTX ranges around fetch, forward, backward, optimizer
    mem_dump_every: NotNegative = 0  # steps between memory snapshots; 0: none

    @property
    def may_use_cudnn(self) -> bool:
        """For the dense twin's attention; its backward pass does not repeat itself bit for bit."""
        return self.sdpa == "auto" and self.use_flash and not self.deterministic


class Train(Section):
    steps: Positive = 50000  # optimizer steps
    seq_len: Positive = 2048
    batch_size: Positive = 1  # micro-batch per GPU, in sequences
    accumulate_grad_batches: Positive = 1  # micro-batches per optimizer step
    lr: PositiveFloat = 2e-4
    lr_min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1  # the cosine ends at lr times this
    warmup_steps: NotNegative = 2000  # optimizer steps
    weight_decay: NotNegativeFloat = 0.1  # matrices only
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    adam_eps: PositiveFloat = 1e-8
    grad_clip: PositiveFloat = 1.0  # largest gradient norm
    seed: NotNegative = 1337
    log_every: Positive = 10
    eval_every: NotNegative = 1000  # steps between validations; 0: only at the end
    eval_batches: Positive = 20
    save_every: Positive = 5000
    keep_checkpoints: NotNegative = 3  # newest ones kept; 0: all
    out_dir: str = "artifacts/m7c_125m"
    tensorboard: bool = True
    csv: bool = True
    aux_stats: bool = True  # gate statistics of every layer in heartbeat and TensorBoard
    sample_prompt: str | None = None  # text to continue when training is done; null: no sample
    max_memory_gb: PositiveFloat = 60.0  # per GPU; phase 2 fails above it


class Config(Section):
    model: Model = Model()
    nsa: Nsa = Nsa()
    data: Data = Data()
    runtime: Runtime = Runtime()
    train: Train = Train()

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        model, nsa, data, runtime = self.model, self.nsa, self.data, self.runtime
        problems = {
            f"model.n_heads must be a multiple of model.n_kv_groups, got {model.n_heads} and {model.n_kv_groups}": (
                model.n_heads % model.n_kv_groups
            ),
            f"model.d_k must be even for rotary positions, got {model.d_k}": model.d_k % 2,
            f"nsa.l must be a multiple of nsa.d, got l={nsa.l} and d={nsa.d}": nsa.l % nsa.d,
            f"nsa.l_sel must be a multiple of nsa.d, got l_sel={nsa.l_sel} and d={nsa.d}": nsa.l_sel % nsa.d,
            f"data.local_path must be set when data.dataset is {data.dataset}": (
                data.dataset in ("fineweb_edu_local", "shards") and not data.local_path
            ),
            "data.synthetic_on_fail must be false when runtime.production is true": (
                runtime.production and data.synthetic_on_fail
            ),
            "runtime.sdpa: flash_only needs runtime.use_flash: true": (
                runtime.sdpa == "flash_only" and not runtime.use_flash
            ),
        }
        if broken := [message for message, is_broken in problems.items() if is_broken]:
            raise ValueError("\n".join(broken))
        return self

    @property
    def vocab_size(self) -> int:
        return VOCABULARY[self.data.tokenizer]

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    def tokens_per_step(self, world_size: int) -> int:
        return self.train.batch_size * self.train.accumulate_grad_batches * self.train.seq_len * world_size

    @property
    def hash(self) -> str:
        """Twelve hex digits that change with any key."""
        canonical = json.dumps(self.model_dump(), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(), sort_keys=False)


def load_config(path: str | Path | None, overrides: list[str] | None = None) -> Config:
    """The configuration of a YAML file with `section.key=value` overrides on top; a ConfigError says what to change."""
    tree = read_yaml(path) if path is not None else {}
    for override in overrides or []:
        apply_override(tree, override)
    return build_config(tree)


def build_config(tree: dict[str, Any]) -> Config:
    """The configuration of a tree; otherwise one ConfigError with a line for each thing that is wrong with it."""
    problems = _unknown(tree)
    try:
        config = Config.model_validate(_known(tree))
    except ValidationError as error:
        problems += _explained(error, tree)
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in a tree that was read from YAML."""
    dotted, equals, text = override.partition("=")
    section, dot, key = dotted.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"override {override!r} must look like section.key=value, for example train.steps=100")
    try:
        value = read_value(text)
    except yaml.YAMLError:
        raise ConfigError(f"override {override!r}: the value is not valid YAML") from None
    if not isinstance(tree.setdefault(section, {}), dict):
        raise ConfigError(f"{section} must be a section with keys")
    tree[section][key] = value


def known_keys() -> list[str]:
    """Every key as `section.key`."""
    return [f"{name}.{key}" for name, section in _sections().items() for key in section.model_fields]


def _sections() -> dict[str, type[Section]]:
    return {name: field.annotation for name, field in Config.model_fields.items()}  # type: ignore[misc]


def _unknown(tree: dict[str, Any]) -> list[str]:
    """A sentence for each section and key that no field reads."""
    sections, problems = _sections(), []
    for name, content in tree.items():
        if name not in sections:
            hint = _nearest(str(name), list(sections))
            problems.append(f"unknown section {name!r}{hint}; known: {', '.join(sections)}")
        elif not isinstance(content, dict):
            problems.append(f"{name} must be a section with keys, got {content!r}")
        else:
            fields = sections[name].model_fields
            unknown = [key for key in content if key not in fields]
            problems += [
                f"unknown key {name}.{key}{_nearest_key(name, str(key))}; known: {', '.join(fields)}" for key in unknown
            ]
    return problems


def _known(tree: dict[str, Any], without: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """The part of a tree that has fields, less the keys named as section.key."""
    return {
        name: {k: v for k, v in tree[name].items() if k in section.model_fields and f"{name}.{k}" not in without}
        for name, section in _sections().items()
        if isinstance(tree.get(name), dict)
    }


def _nearest_key(section: str, wrong: str) -> str:
    """The same key in another section, else the most similar one: of this section, or of any."""
    everywhere = {dotted.partition(".")[2]: dotted for dotted in known_keys()}
    own = {key: dotted for key, dotted in everywhere.items() if dotted.startswith(f"{section}.")}
    for names in ([wrong] if wrong in everywhere else [], own, everywhere):
        matches = difflib.get_close_matches(wrong, names, n=1, cutoff=0.5)
        if matches:
            return f"; did you mean {everywhere[matches[0]]}?"
    return ""


def _nearest(wrong: str, known: list[str]) -> str:
    matches = difflib.get_close_matches(wrong, known, n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else ""


def _explained(error: ValidationError, tree: dict[str, Any]) -> list[str]:
    """A sentence for each wrong value, then for each combination that is impossible whatever these become."""
    wrong = {".".join(map(str, e["loc"][:2])): _explain(e) for e in error.errors() if e["loc"]}
    try:
        Config.model_validate(_known(tree, without=wrong))
    except ValidationError as rest:
        combined = str(rest.errors()[0]["msg"]).removeprefix("Value error, ").splitlines()
        return [*wrong.values(), *(line for line in combined if not _names_any(line, wrong))]
    return list(wrong.values())


def _names_any(sentence: str, keys: Iterable[str]) -> bool:
    return any(re.search(rf"{re.escape(key)}\b", sentence) for key in keys)


def _explain(error: Any) -> str:
    """One validation error as a sentence: the key, what was given, what it may hold."""
    where, message = ".".join(map(str, error["loc"][:2])), str(error["msg"])
    if choices := _choices(where):
        return f"{where} is {error['input']!r}, which is none of its values (allowed: {', '.join(choices)})"
    return f"{where} is {error['input']!r}: {message[0].lower()}{message[1:]}"


def _choices(dotted: str) -> list[str]:
    """The words a key may hold, if it holds words."""
    section, _, key = dotted.partition(".")
    field = _sections()[section].model_fields.get(key)
    return [a for a in get_args(field.annotation) if isinstance(a, str)] if field else []
