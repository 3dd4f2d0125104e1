"""The run configuration as typed sections: every key with its default, range and meaning. No torch.

`python -m tamis.config.reference` writes docs/configuration.md from these fields.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_serializer

from tamis.config.addresses import address, shown_address
from tamis.config.vocabulary import VOCABULARY
from tamis.config.yaml_file import write_value

VOCABULARY_MULTIPLE = 128  # the output matrix is padded to this for tensor cores; padding is never predicted

MOST_STEPS = 10**9
MOST_TOKENS = 2**24  # of one sequence
MOST_TOKENS_PER_STEP = 2**31  # of one process
LOCAL = ("local", "fineweb_edu_local")  # two names of one source, data.dataset
LONGEST_TEXT = 1000  # characters of a name or path
OPERATION = ("log", "notify", "cost", "copy")  # sections about the operator: no effect on what is trained


def _one_line(text: str) -> str:
    if not text or len(text) > LONGEST_TEXT or not text.isprintable():
        raise ValueError(f"it must be 1 to {LONGEST_TEXT} printable characters on one line")
    return text


def _directory(text: str) -> str:
    if text[:1] in ("-", "~"):
        raise ValueError(f"it must not begin with {text[0]}: write ./{text}, or the whole path")
    return _one_line(text)


def _copy_target(text: str) -> str:
    if re.match(r"[^/@]*://[^/@]*:[^/@]*@", text):
        raise ValueError("it must not hold a password: use an SSH key, or the variables and files of the store's tool")
    if not re.match(r"[A-Za-z][\w+.-]*://.|[\w][\w.@-]*:[^/]|[\w][\w.@-]*:/[^/]", text):
        raise ValueError("it must be file:///path, ssh://host/path, user@host:path, or a URL such as s3://bucket/path")
    return _one_line(text)


Line = Annotated[str, AfterValidator(_one_line)]
Directory = Annotated[str, AfterValidator(_directory)]
Address = Annotated[str, AfterValidator(_one_line), AfterValidator(address)]
CopyTarget = Annotated[str, AfterValidator(_copy_target)]


def _count(default: int, description: str, *, least: int = 1, most: int = MOST_STEPS) -> Any:
    return Field(default, ge=least, le=most, description=description)


def _above_zero(default: float, description: str, *, most: float) -> Any:
    return Field(default, gt=0, le=most, allow_inf_nan=False, description=description)


def _key(default: Any, description: str, **limits: Any) -> Any:
    return Field(default, description=description, **limits)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Model(Section):
    """The decoder. The defaults are M7C, with 125.4M parameters."""

    name: Line = _key("m7c_125m", "Name of the model, printed and stored with every run.")
    attention: Literal["nsa", "dense"] = _key("nsa", "`dense` is the twin with ordinary causal attention.")
    dim: int = _count(768, "Width of the residual stream.", most=2**16)
    n_layers: int = _count(12, "Decoder layers.", most=1024)
    n_heads: int = _count(12, "Query heads.", most=1024)
    n_kv_groups: int = _count(2, "Key/value heads; each serves `n_heads / n_kv_groups` query heads.", most=1024)
    d_k: int = _count(64, "Head dimension of queries, keys and values.", most=1024)
    d_ff: int = _count(2240, "Width of the feed-forward layer.", most=2**20)
    rope_base: float = _above_zero(10000.0, "Base of the rotary frequencies.", most=1e12)
    rope_scale: float = _above_zero(1.0, "Positions are divided by this in every branch.", most=1e6)
    norm_eps: float = _above_zero(1e-5, "Epsilon of the RMS norms.", most=1.0)
    mlp: Literal["swiglu", "relu2"] = _key(
        "swiglu", "Feed-forward layer: SwiGLU, or the square of ReLU, whose `d_ff` may be half as wide again."
    )
    qk_norm: bool = _key(False, "Divide every query and key by its root mean square.")
    logit_soft_cap: float = _key(0.0, "Limit the logits to ± this by a hyperbolic tangent; 0: no limit.", ge=0, le=1e6)


LayerKind = Literal["nsa", "window", "dense"]


class Nsa(Section):
    """Native Sparse Attention, with the paper's names."""

    l: int = _count(32, "Tokens per compressed block.", most=2**16)  # noqa: E741
    d: int = _count(16, "Stride between compressed blocks.", most=2**16)
    l_sel: int = _count(64, "Tokens per selection block.", most=2**16)
    n_sel: int = _count(16, "Blocks each query attends to, including block 0 and the two newest.", least=3, most=2**16)
    w: int = _count(512, "Sliding window in tokens.", most=MOST_TOKENS)
    phi: Literal["mlp", "avg"] = _key("mlp", "How a block is compressed: learned (`mlp`) or by its mean (`avg`).")
    layers: LayerKind | list[LayerKind] = _key(
        "nsa",
        "What each layer computes: one word for all layers, or a list that repeats; `window` is its branch alone.",
    )


class Data(Section):
    """What the model reads."""

    dataset: Literal["fineweb_edu", "local", "fineweb_edu_local", "shards", "mixture", "sample", "synthetic"] = _key(
        "fineweb_edu",
        "A hub dataset, local files (or fineweb_edu_local), token shards, a mixture, the sample, or random tokens.",
    )
    mixture: dict[Line, Annotated[float, Field(gt=0, le=1e6)]] | None = _key(
        None, "Sources and their weights: paths of files or shards, `fineweb_edu` or `sample`.", min_length=1
    )
    tokenizer: Line = _key(
        "gpt2", "`gpt2`, `byte`, or a file: a Hugging Face tokenizer.json, its folder, or .tiktoken ranks."
    )
    vocab_size: Annotated[int, Field(ge=2, le=2**22)] | None = _key(
        None, "Tokens of the vocabulary; null: read from the tokenizer, and stored with the run."
    )
    local_path: Line | None = _key(None, "Parquet, JSONL or text files, a folder of them, or a folder of token shards.")
    hub_name: Line = _key("HuggingFaceFW/fineweb-edu", "Hugging Face dataset, or a local folder laid out as one.")
    hub_subset: Line = _key("sample-10BT", "Subset of the hub dataset.")
    hub_revision: Line | None = _key(None, "Commit or tag of the hub dataset; null: its newest.")
    text_column: Line = _key("text", "Column or JSON key that holds the text.")
    cache_gib: float = _key(
        50.0, "Most of a hub dataset kept on disk in HF_DATASETS_CACHE, if that is set; 0: nothing.", ge=0, le=1e6
    )
    val_fraction: float = _key(0.005, "Share of documents held out by hash, never trained on.", ge=0, lt=1)
    epochs: Annotated[int, Field(ge=1, le=10**6)] | None = _key(
        1, "Passes over the data before its end is an error; null: without end."
    )
    loader_timeout_s: float = _above_zero(120.0, "Longest wait for one batch, in seconds.", most=86400)
    prefetch_batches: int = _count(8, "Batches prepared ahead in the background.", most=10_000)
    lanes: int = _count(
        24, "Streams are split into this many lanes; a multiple of every number of processes used.", most=2**16
    )
    packing: Literal["stream", "documents"] = _key(
        "stream", "Attention inside a row: across documents (`stream`) or within each document (`documents`)."
    )
    on_bad_record: Literal["stop", "skip"] = _key("stop", "Unreadable record: stop and name it, or count it and go on.")
    synthetic_on_fail: bool = _key(
        False, "Replace failing data by random tokens and mark the run; never in production."
    )


class Runtime(Section):
    """How the step runs on the device."""

    device: Literal["auto", "cpu", "cuda"] = _key("auto", "`auto` takes a GPU if there is one.")
    precision: Literal["bf16", "fp16", "fp32"] = _key(
        "bf16", "Precision of the computation; master weights are always fp32."
    )
    compile: bool = _key(True, "Compile the step with torch.compile; only on a GPU.")
    cuda_graph: bool = _key(
        True, "One GPU: replay forward and backward as a CUDA graph, up to 131,072 tokens; saves launch time."
    )
    deterministic: bool = _key(False, "Bit-identical repeats on a GPU, at some cost in speed.")
    gradient_checkpointing: bool = _key(False, "Recompute activations in backward: less memory, about a third slower.")
    production: bool = _key(False, "Refuse whatever would make the result doubtful, such as substituted data.")
    use_flash: bool = _key(True, "Dense twin: allow PyTorch's flash attention.")
    sdpa: Literal["auto", "no_flash", "flash_only"] = _key(
        "auto", "Dense twin: which of PyTorch's attention kernels may run."
    )
    sdpa_audit: bool = _key(False, "Print once which attention kernels PyTorch could choose from.")
    parallel: Literal["ddp", "fsdp"] = _key("ddp", "Several processes: replicate the weights, or shard them.")
    ddp_bucket_mb: int = _count(25, "Size of DDP's gradient buckets, in MB.", most=2**16)
    ddp_static_graph: bool = _key(True, "DDP may rely on the same graph in every step.")
    ddp_find_unused: bool = _key(False, "DDP searches for unused parameters.")
    ddp_compress: Literal["none", "bf16", "fp16"] = _key("none", "Data type of gradients between processes.")
    ddp_safe_mode: bool = _key(False, "Plainest DDP settings: no static graph, no compression, no compile.")
    ddp_disable_gc: bool = _key(False, "Several processes: gradient checkpointing stays off, whatever its key is.")
    weight_check_every: int = _count(
        500, "Steps between checks that all ranks hold the same weights; 0: never.", least=0
    )
    scaler_init_scale: float = _above_zero(65536.0, "fp16: first loss scale.", most=1e12)
    scaler_growth_interval: int = _count(2000, "fp16: steps without overflow until the loss scale grows.")
    scaler_growth_factor: float = _key(2.0, "fp16: growth of the loss scale.", gt=1, le=1e6, allow_inf_nan=False)
    scaler_backoff_factor: float = _key(0.5, "fp16: factor on the scale after an overflow.", gt=0, lt=1)
    nvtx: bool = _key(False, "NVTX ranges around fetch, forward, backward and optimizer, for a profiler.")
    mem_dump_every: int = _count(0, "Steps between memory snapshots; 0: none.", least=0)
    spare_worker: bool = _key(True, "One process: keep another with torch loaded for a restart; 400 MB of memory.")

    @property
    def may_use_cudnn(self) -> bool:
        """True if the dense twin may use cuDNN, whose backward pass is not bit-identical from run to run."""
        return self.sdpa == "auto" and self.use_flash and not self.deterministic


class Train(Section):
    """The training run and what it writes."""

    steps: int = _count(50000, "Optimizer steps.")
    tokens: float | None = _key(
        None, "Tokens to train on, which give the steps when a run starts; null: `steps` counts.", gt=0, le=1e16
    )
    seq_len: int = _count(2048, "Tokens per sequence.", most=MOST_TOKENS)
    length_schedule: list[int] = _key([], "Lengths that rise to `seq_len`, in equal shares of the steps.", max_length=6)
    batch_size: int = _count(1, "Micro-batch per GPU, in sequences.", most=2**20)
    accumulate_grad_batches: int = _count(1, "Micro-batches per optimizer step.", most=2**20)
    batch_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS_PER_STEP)] | None = _key(
        None, "Tokens per optimizer step, which give `accumulate_grad_batches` when a run starts; null: that counts."
    )
    recipe: Literal["runbook", "speedrun"] = _key(
        "runbook", "Values for the keys of a tuned recipe, where the same file or command line does not set them."
    )
    optimizer: Literal["adamw", "muon"] = _key("adamw", "`muon` trains the matrices of the layers, AdamW the rest.")
    zero_init: bool = _key(False, "Start the output projections of attention and feed-forward at zero.")
    lr: float = _above_zero(2e-4, "Peak learning rate, reached after the warm-up.", most=1000)
    schedule: Literal["cosine", "trapezoid"] = _key(
        "cosine", "Learning rate after the warm-up: a cosine, or constant with a linear end."
    )
    decay_fraction: float = _key(0.4, "Trapezoid: the share of all steps over which the rate falls.", gt=0, le=1)
    lr_min_ratio: float = _key(0.1, "The schedule ends at `lr` times this.", ge=0, le=1)
    warmup_steps: int = _count(2000, "Optimizer steps of linear warm-up.", least=0)
    weight_decay: float = _key(0.1, "Weight decay of matrices; vectors have none.", ge=0, le=1000, allow_inf_nan=False)
    beta1: float = _key(0.9, "AdamW: decay of the first moment.", ge=0, lt=1)
    beta2: float = _key(0.95, "AdamW: decay of the second moment.", ge=0, lt=1)
    adam_eps: float = _above_zero(1e-8, "AdamW: epsilon.", most=1.0)
    muon_lr: float | None = _key(
        None, "Muon: peak learning rate of its matrices, on AdamW's scale; null: `lr`.", gt=0, le=1000
    )
    muon_momentum: float = _key(0.95, "Muon: decay of its momentum.", ge=0, lt=1)
    grad_clip: float = _above_zero(1.0, "Largest gradient norm.", most=1e9)
    seed: int = _count(1337, "Seed of weights and data order.", least=0, most=2**63 - 1)
    log_every: int = _count(10, "Steps between rows of training.csv.")
    eval_every: int = _count(1000, "Steps between validations; 0: only at the end.", least=0)
    eval_batches: int = _count(20, "Validation batches per rank.", most=10**6)
    save_every: int = _count(5000, "Steps between checkpoints.")
    keep_checkpoints: int = _count(3, "Newest checkpoints to keep; 0: all.", least=0)
    max_unsaved_steps: int | None = _key(
        None,
        "Steps that may stay unsaved while saves fail, before the run ends; null: 2 × save_every; 0: no limit.",
        ge=0,
        le=MOST_STEPS,
    )
    min_loss: float | None = _key(
        None,
        "Training loss below which a run stops as implausible; null: by tokenizer and data; 0: no limit.",
        ge=0,
        le=100,
    )
    init_from: Line | None = _key(
        None, "Weights to start from at step 0: a checkpoint, a run, an exported folder or a safetensors file."
    )
    out_dir: Directory = _key("artifacts/m7c_125m", "Directory for everything the run writes.")
    tensorboard: bool = _key(True, "Write TensorBoard files to OUT/tb.")
    csv: bool = _key(True, "Write training.csv and val.csv.")
    aux_stats: bool = _key(True, "Gate statistics of every layer in heartbeat and TensorBoard.")
    sample_prompt: str | None = _key(None, "Text to continue after training; null: no sample.", max_length=100_000)
    samples: int = _count(
        3, "Openings of held-out text that each evaluation continues, in samples.jsonl; 0: none.", least=0, most=64
    )
    max_memory_gb: float = _above_zero(60.0, "Memory limit per GPU; phase 2 fails above it.", most=1e5)

    @property
    def unsaved_steps_limit(self) -> int:
        """The steps that may stay unsaved; 0: no limit."""
        return 2 * self.save_every if self.max_unsaved_steps is None else self.max_unsaved_steps


LoggerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class Log(Section):
    """Where the curves go besides training.csv; see operations.md."""

    to: LoggerName | list[LoggerName] = _key(
        "tensorboard", "Loggers of the curves, one or a list; all but TensorBoard need their package."
    )
    project: Line = _key("tamis", "Project or experiment that a logger files the run under.")
    offline: bool = _key(False, "Loggers write under OUT alone and send nothing.")

    @property
    def names(self) -> list[str]:
        return [self.to] if isinstance(self.to, str) else list(self.to)


class Notify(Section):
    """Messages to the operator, sent by the supervisor; see operations.md."""

    to: Address | list[Address] = Field(
        default=[],
        repr=False,  # an address may hold a password
        description="Where messages go: https://… gets JSON, other schemes need apprise; also TAMIS_NOTIFY.",
    )
    digest_hours: float = _key(0.0, "Hours between messages about the progress; 0: none.", ge=0, le=1000)
    idle_hours: float = _key(
        0.0, "Hours between reminders after the end, for which the launch stays alive; 0: none.", ge=0, le=1000
    )

    @property
    def addresses(self) -> list[str]:
        return [self.to] if isinstance(self.to, str) else self.to

    @field_serializer("to")
    def _without_secrets(self, to: str | list[str]) -> str | list[str]:
        """What is stored of the addresses, in config.yaml, run.info and checkpoints: no part that could be secret."""
        return shown_address(to) if isinstance(to, str) else [shown_address(one) for one in to]


class Cost(Section):
    """The price of the machine, limits on it, and what happens to the machine after the run; see operations.md."""

    per_hour: float = _key(0.0, "Price of the whole machine per hour, in $; 0: unknown.", ge=0, le=1e6)
    max: float | None = _key(
        None, "At this cost, over all launches, the run saves and ends; null: no limit.", gt=0, le=1e9
    )
    max_hours: float | None = _key(
        None, "After so many hours, over all launches, the run saves and ends; null: no limit.", gt=0, le=1e6
    )
    on_end: list[Line] = _key(
        [], "Command, as a list of words, that runs once after the end, for example to stop the machine."
    )
    grace_s: float = _key(300.0, "Seconds before on_end in which `touch OUT/.KEEP` cancels it.", ge=0, le=86400)


class Copy(Section):
    """Copies of checkpoints, curves, events and report in another place, made while the run trains."""

    to: CopyTarget | None = _key(
        None,
        "Where the copies go: `file:///path`, `user@host:path`, `ssh://host/path`, `s3://bucket/path`; null: nowhere.",
        repr=False,  # a wrong one may hold a password
    )
    keep: int = _count(3, "Newest copies of checkpoints to keep there; 0: all.", least=0)
    max_mbps: float | None = _key(
        None, "Most megabits per second that an upload takes; null: no limit.", gt=0, le=1e6, allow_inf_nan=False
    )
    wait_s: float = _above_zero(3600.0, "Longest wait for the last copy when a run has ended, in seconds.", most=1e6)


# Pydantic warns of the name of a deprecated method. The section is called what operators write.
warnings.filterwarnings("ignore", message='Field name "copy" in "Config" shadows')


class Config(Section):
    model: Model = Model()
    nsa: Nsa = Nsa()
    data: Data = Data()
    runtime: Runtime = Runtime()
    train: Train = Train()
    log: Log = Log()
    notify: Notify = Notify()
    cost: Cost = Cost()
    copy: Copy = Copy()  # type: ignore[assignment]

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary; the last is end-of-text."""
        return self.data.vocab_size or VOCABULARY[self.data.tokenizer]

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @property
    def layer_kinds(self) -> list[str]:
        """What each layer computes, from `model.attention` and `nsa.layers`."""
        layers = self.nsa.layers if self.model.attention == "nsa" else "dense"
        pattern = [layers] if isinstance(layers, str) else layers
        return [pattern[i % len(pattern)] for i in range(self.model.n_layers)]

    def tokens_per_step(self, world_size: int) -> int:
        return self.train.batch_size * self.train.accumulate_grad_batches * self.train.seq_len * world_size

    def with_steps(self, world_size: int) -> Config:
        """The same run in micro-batches and steps if it is given in tokens, rounded up."""
        train = self.train
        if train.batch_tokens is not None:
            micro_batch = train.batch_size * train.seq_len * world_size
            micro_batches = min(2**20, math.ceil(train.batch_tokens / micro_batch))
            return self._with_train(accumulate_grad_batches=micro_batches, batch_tokens=None).with_steps(world_size)
        if train.tokens is None:
            return self
        steps = min(MOST_STEPS, math.ceil(train.tokens / self.tokens_per_step(world_size)))
        return self._with_train(steps=steps, tokens=None)

    def _with_train(self, **changes: Any) -> Config:
        return self.model_copy(update={"train": self.train.model_copy(update=changes)})

    @property
    def hash(self) -> str:
        """Twelve hex digits that change with any key, except those about operation."""
        canonical = json.dumps(self.model_dump(exclude=set(OPERATION)), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    def __hash__(self) -> int:
        return hash(self.hash)  # the default would refuse keys that hold lists

    def to_yaml(self) -> str:
        return write_value(self.model_dump())
