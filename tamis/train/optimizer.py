"""AdamW on fp32 master weights, the learning-rate schedule, and one optimizer step that never waits for the device."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tamis.config import Config, Train


def learning_rate(step: int, train: Train) -> float:
    """Return the rate of optimizer step `step`, from 1: linear warm-up to `lr`, then a cosine to `lr·lr_min_ratio`."""
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    progress = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    floor = train.lr * train.lr_min_ratio
    return floor + (train.lr - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.AdamW:
    train = config.train
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},  # norms and biases keep their scale
    ]
    return torch.optim.AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.adam_eps, fused=True)


class OptimizerStep:
    """Unscale, clip and apply gradients. A non-finite gradient leaves weights and optimizer state unchanged."""

    def __init__(self, model: nn.Module, config: Config, device: torch.device) -> None:
        self.config = config
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(self.named.values())
        self.optimizer = build_optimizer(model, config)
        self.scaler = loss_scaler(config, device)
        self.keep_gradients = False  # True: a CUDA graph overwrites them in place, so they are not freed

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def step(self, number: int, veto: Tensor | None = None) -> Tensor:
        """Apply the gradients as optimizer step `number`; returns their norm before clipping, on the device.

        A `veto` that is true on the device makes the norm NaN. A norm that is not finite skips the update.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(number, self.config.train)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if veto is not None:
            smallest = min(gradients, key=lambda gradient: gradient.numel())
            smallest *= torch.where(veto, math.nan, 1.0)
        self.scaler.unscale_(self.optimizer)
        norm = _whole(torch.nn.utils.get_total_norm(gradients))
        torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.train.grad_clip, norm)
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            # The fused kernel reads this flag on the device and skips the update: no wait for the host.
            self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
            self.optimizer.step()
        if not self.keep_gradients:
            self.optimizer.zero_grad()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter name, independent of the order and the sharding of the parameters."""
        optimizer = {name: dict(self.optimizer.state[p]) for name, p in self.named.items() if p in self.optimizer.state}
        without = [name for name in self.named if name not in optimizer]  # no gradient ever reached them
        return {"optimizer": optimizer, "without_moments": without, "scaler": self.scaler.state_dict()}

    def blank_moments(self) -> dict[str, dict[str, Tensor]]:
        """Return an optimizer state to read a checkpoint into, sharded as the parameters are."""
        return {
            name: {
                "step": torch.zeros((), device=p.device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
            for name, p in self.named.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load moments and loss scale; groups, learning rate and betas come from the configuration."""
        for name, moments in state["optimizer"].items():
            self.optimizer.state[self.named[name]] = dict(moments)
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
