"""The optimizer, its parameter groups, and the learning-rate schedule.

Weights and moments are float32 on every device; on CUDA the matrix products run in bfloat16 under
autocast, so the parameters themselves are the master weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from infini_model.config import TrainingConfig
from infini_model.model.memory import MEMORY_PARAMETERS
from infini_model.training.distributed import World
from infini_model.training.muon import Muon


def group_of(name: str, parameter: nn.Parameter) -> str:
    """Return the group of a parameter; `layers` are the matrices of the decoder layers.

    Weight decay applies to matrices, but not to norms or embeddings: a rare token's row would
    shrink between its few gradients. Nor does it to the memory's own parameters, which have their
    own learning rate: decay would pull those before a sigmoid to one half.
    """
    if name.rsplit(".", 1)[-1] in MEMORY_PARAMETERS:
        return "memory"
    if parameter.ndim < 2 or "embed_tokens" in name:
        return "no decay"
    return "layers" if ".layers." in name else "decay"


def make_optimizer(
    model: nn.Module, config: TrainingConfig, world: World | None = None
) -> torch.optim.Optimizer:
    """Make the optimizer of the parameters that are trained; its groups keep their `peak` rates.

    Muon takes the group `layers`, AdamW the groups `decay`, `no decay` and `memory`, or all.
    `world` are the ranks that train together, by default this process alone.
    """
    names = ("layers", "decay", "no decay", "memory")
    members: dict[str, list[nn.Parameter]] = {name: [] for name in names}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            members[group_of(name, parameter)].append(parameter)
    groups = [
        {
            "name": name,
            "params": parameters,
            "weight_decay": config.weight_decay if name in ("layers", "decay") else 0.0,
            "peak": config.memory_learning_rate if name == "memory" else config.learning_rate,
        }
        for name, parameters in members.items()
        if parameters
    ]
    matrices = groups.pop(0) if config.optimizer == "muon" else None
    adamw = torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )
    if matrices is None:
        return adamw
    device = adamw.param_groups[0]["params"][0].device
    return Muon(matrices, adamw, world or World(0, 1, device))


def learning_rate_share(step: int, config: TrainingConfig) -> float:
    """Learning rate at step `step` (1 to the last) as a fraction of the peak.

    Linear from 1 / warmup_steps to 1 at step warmup_steps; in the last `decay_steps` down to
    min_learning_rate_ratio, by a cosine or linearly; 1 in between. It depends on nothing else, so
    that a run may branch into any schedule. `wsd` is that of Hu et al., arXiv 2404.06395, with the
    linear decay of Hägele et al., arXiv 2405.18392.
    """
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    decay = _decay_steps(config)
    progress = max(0.0, (step - (config.total_steps - decay)) / max(1, decay))
    left = 1.0 - min(1.0, progress)
    if config.schedule == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return config.min_learning_rate_ratio + (1.0 - config.min_learning_rate_ratio) * left


def _decay_steps(config: TrainingConfig) -> int:
    """Count the steps in which the learning rate decays; 0 if it does not."""
    if config.decay_steps is not None or config.schedule == "constant":
        return config.decay_steps or 0
    rest = max(0, config.total_steps - config.warmup_steps)
    return min(rest, math.ceil(config.total_steps / 5)) if config.schedule == "wsd" else rest


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, config: TrainingConfig) -> float:
    """Set every group's learning rate for step `step`; returns that of the matrices."""
    share = learning_rate_share(step, config)
    for group in optimizer.param_groups:
        group["lr"] = share * group["peak"]
    return share * config.learning_rate


class LossScaler(torch.amp.GradScaler):
    """fp16's loss scale: small gradients underflow in fp16, so the loss is scaled up.

    Unlike in its base class nothing waits for the device, but for `state_dict`.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        super().__init__(device.type, enabled=enabled)
        if enabled:
            self._lazy_init_scale_growth_tracker(device)

    @property
    def tensors(self) -> list[Tensor]:
        """The scale and the steps since it has changed; empty if it is not enabled."""
        tensors = [self._scale, self._growth_tracker] if self.is_enabled() else []
        return [tensor for tensor in tensors if tensor is not None]

    def restore(self, tensors: Iterable[Tensor]) -> None:
        """Go back to a copy of `tensors`."""
        for tensor, before in zip(self.tensors, tensors, strict=True):
            tensor.copy_(before)

    def unscale_and_update(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Divide the gradients by the scale and update it; whether they overflowed, bool [].

        After an overflow the gradients hold infinities and the scale is halved. If the scale is
        below 1, the gradients themselves are not finite, and this is not reported as an overflow.
        """
        self.unscale_(optimizer)
        before = self.tensors[0].clone()
        self.update()
        after = self.tensors[0]
        return (after >= 1.0) & (after < before)
