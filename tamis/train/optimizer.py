"""The optimizers on fp32 master weights, the learning-rate schedule, and one step that never waits for the device."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tamis.config import Config, Train

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # a quintic whose iteration brings all singular values near 1
ITERATIONS = 5
RMS_OF_ADAMW = 0.2  # of a typical update of AdamW, so that both optimizers take learning rates of one scale


def learning_rate(step: int, train: Train) -> float:
    """Return the rate of optimizer step `step`, from 1: linear warm-up to `lr`, then down to `lr·lr_min_ratio`.

    The way down is a cosine, or with `schedule: trapezoid` constant until a linear end.
    """
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    floor = train.lr * train.lr_min_ratio
    if train.schedule == "trapezoid":
        remaining = max(0, train.steps - step) / max(1.0, train.steps * train.decay_fraction)
        return floor + (train.lr - floor) * min(1.0, remaining)
    progress = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    return floor + (train.lr - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """Return AdamW for all parameters that Muon does not train."""
    train, of_muon = config.train, muon_matrices(model, config)
    parameters = [p for name, p in model.named_parameters() if p.requires_grad and name not in of_muon]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},  # norms and biases keep their scale
    ]
    return AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.adam_eps, fused=True)


def build_muon(model: nn.Module, config: Config) -> Muon | None:
    train, matrices = config.train, muon_matrices(model, config)
    if not matrices:
        return None
    named = dict(model.named_parameters())
    parameters = [named[name] for name in matrices]
    rate = train.muon_lr or train.lr
    return Muon(parameters, list(matrices.values()), rate, train.muon_momentum, train.weight_decay)


def muon_matrices(model: nn.Module, config: Config) -> dict[str, list[int]]:
    """Return the names of the matrices that Muon trains, each with the rows of its parts; AdamW trains the rest.

    These are the projections of attention and the feed-forward layers. A merged projection has a part for all queries
    and one for each kind of keys and values.
    """
    if config.train.optimizer != "muon":
        return {}
    shapes = config.model
    queries, keys = shapes.n_heads * shapes.d_k, shapes.n_kv_groups * shapes.d_k
    matrices = {}
    for name, parameter in model.named_parameters():
        rows = parameter.shape[0]
        if name.endswith("attention.project.weight"):
            matrices[name] = [queries, *[keys] * ((rows - queries) // keys)]
        elif name.endswith("feed_forward.gate_and_up.weight"):
            matrices[name] = [rows // 2] * 2
        elif name.endswith(("attention.out.weight", "feed_forward.up.weight", "feed_forward.down.weight")):
            matrices[name] = [rows]
    return matrices


class OptimizerStep:
    """Unscale, clip and apply gradients. A non-finite gradient leaves weights and optimizer state unchanged."""

    def __init__(self, model: nn.Module, config: Config, device: torch.device) -> None:
        self.config = config
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(self.named.values())
        self.optimizer = build_optimizer(model, config)
        self.muon = build_muon(model, config)
        self.of_muon = muon_matrices(model, config)
        self.scaler = loss_scaler(config, device)
        self.keep_gradients = False  # True: a CUDA graph overwrites them in place, so they are not freed

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer, *([self.muon] if self.muon else [])]

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def step(self, number: int, veto: Tensor | None = None) -> Tensor:
        """Apply the gradients as optimizer step `number`; returns their norm before clipping, on the device.

        A `veto` that is true on the device makes the norm NaN. A norm that is not finite skips the update.
        """
        self._set_learning_rate(number)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if veto is not None:
            smallest = min(gradients, key=lambda gradient: gradient.numel())
            smallest *= torch.where(veto, math.nan, 1.0)
        self.scaler.unscale_(self.optimizer)
        norm = _whole(torch.nn.utils.get_total_norm(gradients))
        clip = self.config.train.grad_clip
        if self.scaler.is_enabled():
            torch.nn.utils.clip_grads_with_norm_(self.parameters, clip, norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            # Read on the device: a step is skipped without a wait for the host, and the kernel that applies gradients
            # clips them, which saves a pass over all of them.
            found_inf, grad_scale = (~norm.isfinite()).float(), ((norm + 1e-6) / clip).clamp_min(1.0)
            for optimizer in self._optimizers:
                optimizer.found_inf, optimizer.grad_scale = found_inf, grad_scale  # type: ignore[attr-defined]
                optimizer.step()
        if not self.keep_gradients:
            for parameter in self.parameters:
                parameter.grad = None
        return norm

    def _set_learning_rate(self, number: int) -> None:
        train = self.config.train
        rate = learning_rate(number, train)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for group in self.muon.param_groups if self.muon else []:
            group["lr"] = rate * (train.muon_lr or train.lr) / train.lr

    def _moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the state of whichever optimizer trains the parameter; empty before its first step."""
        return next((dict(one.state[parameter]) for one in self._optimizers if parameter in one.state), {})

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter name, independent of the order and the sharding of the parameters."""
        optimizer = {name: moments for name, p in self.named.items() if (moments := self._moments(p))}
        without = [name for name in self.named if name not in optimizer]  # no gradient ever reached them
        return {"optimizer": optimizer, "without_moments": without, "scaler": self.scaler.state_dict()}

    def blank_moments(self) -> dict[str, dict[str, Tensor]]:
        """Return an optimizer state to read a checkpoint into, sharded as the parameters are."""
        return {name: self._blank(name, p) for name, p in self.named.items()}

    def _blank(self, name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
        if name in self.of_muon:
            return {"momentum_buffer": torch.zeros_like(parameter)}
        moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), device=parameter.device), **moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load moments and loss scale; groups, learning rate and betas come from the configuration."""
        for name, moments in state["optimizer"].items():
            trained_by = self.muon if self.muon is not None and name in self.of_muon else self.optimizer
            trained_by.state[self.named[name]] = dict(moments)
        self.scaler.load_state_dict(state["scaler"])


def _whole(norm: Tensor) -> Tensor:
    """Return the norm over all shards: under FSDP it is a DTensor with one part per rank."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def loss_scaler(config: Config, device: torch.device) -> torch.amp.GradScaler:
    runtime = config.runtime
    return torch.amp.GradScaler(
        device.type,
        enabled=runtime.precision == "fp16",
        init_scale=runtime.scaler_init_scale,
        growth_interval=runtime.scaler_growth_interval,
        growth_factor=runtime.scaler_growth_factor,
        backoff_factor=runtime.scaler_backoff_factor,
    )


class AdamW(torch.optim.AdamW):
    """torch's AdamW, which here does not load the compiler: it takes 1.6 s, and a run that compiles nothing needs none.

    What is left off torch's methods only tells the compiler to break its graph. The trainer never compiles this step.
    """

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Muon(torch.optim.Optimizer):
    """Step matrices along their orthogonalised Nesterov momentum, with decoupled weight decay.

    It computes what `torch.optim.Muon` does with `adjust_lr_fn="match_rms_adamw"`, with three differences. Matrices of
    one shape share a batched product. A merged projection is made orthogonal part by part, as if each part were a
    matrix of its own. And a flag on the device skips the update, so that a gradient that is not finite needs no host
    sync.

    Args:
        parameters: matrices, whole or sharded by FSDP.
        rows: for each matrix, the rows of its parts; their sum is its number of rows.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        rows: Sequence[Sequence[int]],
        lr: float,
        momentum: float,
        weight_decay: float,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._rows = dict(zip(parameters, rows, strict=True))
        self.found_inf: Tensor | float = 0.0  # 1 on the device: this step changes nothing
        self.grad_scale: Tensor | float = 1.0  # gradients are divided by it

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        keep = 1.0 - self.found_inf
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            directions = [_whole_like(p, self._direction(p, group["momentum"], keep)) for p in parameters]
            updates = orthogonalised(directions, [self._rows[p] for p in parameters])
            for parameter, update in zip(parameters, updates, strict=True):
                weight = _local(parameter)
                weight.mul_(1.0 - group["lr"] * group["weight_decay"] * keep)
                weight.sub_(_shard_like(parameter, update) * (group["lr"] * keep))

    def _direction(self, parameter: nn.Parameter, momentum: float, keep: Tensor | float) -> Tensor:
        """Update the momentum; return this rank's part of the Nesterov direction, finite even in a skipped step."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        gradient, buffer = _local(parameter.grad) / self.grad_scale, _local(state["momentum_buffer"])
        if isinstance(keep, Tensor):
            gradient = torch.where(keep > 0, gradient, 0.0)
        buffer.add_((gradient - buffer) * ((1.0 - momentum) * keep))
        return gradient.lerp(buffer, momentum)


def orthogonalised(matrices: Sequence[Tensor], rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the nearest orthogonal matrix of each part of `rows`, scaled to the size of an update of AdamW."""
    parts = [part for matrix, sizes in zip(matrices, rows, strict=True) for part in matrix.split(list(sizes))]
    by_shape: dict[torch.Size, list[int]] = {}
    for index, part in enumerate(parts):
        by_shape.setdefault(part.shape, []).append(index)
    for shape, indices in by_shape.items():
        batch = _newton_schulz(torch.stack([parts[index] for index in indices]))
        scaled = batch.to(parts[indices[0]].dtype) * (RMS_OF_ADAMW * max(shape) ** 0.5)
        for index, part in zip(indices, scaled, strict=True):
            parts[index] = part
    remaining = iter(parts)
    return [torch.cat([next(remaining) for _ in sizes]) for sizes in rows]


def _newton_schulz(matrices_NRC: Tensor) -> Tensor:
    """Bring the singular values of each matrix near 1, in bfloat16, whose precision is enough for a direction."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices_NRC.shape[1] > matrices_NRC.shape[2]
    x = matrices_NRC.bfloat16()
    x = x.mT if is_tall else x  # the smaller Gram matrix
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, which shares its memory; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _whole_like(parameter: Any, shard: Tensor) -> Tensor:
    """Return the tensor of which each rank holds a shard as it does of `parameter`."""
    if not hasattr(parameter, "to_local"):
        return shard
    from torch.distributed.tensor import DTensor  # here, because it loads slowly

    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(
        shard, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    ).full_tensor()


def _shard_like(parameter: Any, whole: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that every rank holds whole."""
    if not hasattr(parameter, "to_local"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
