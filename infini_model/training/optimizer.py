"""The optimizer, its parameter groups, and the learning-rate schedule.

Weights and moments are float32 on every device; on CUDA the matrix products run in bfloat16 under
autocast, so the parameters themselves are the master weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from infini_model.config import TrainingConfig
from infini_model.model.memory import MEMORY_PARAMETERS
from infini_model.training.distributed import World
from infini_model.training.parallel import full_tensor, local_shard, shard_of

# Of Muon. The polynomial takes singular values towards 1, and is applied so many times.
MOMENTUM = 0.95
COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
# Many small matrices at once keep a GPU busy; more numbers than this would only take memory.
NUMBERS_AT_ONCE = 2**24


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


class Muon(torch.optim.Optimizer):
    """Muon over the group `matrices`, and `adamw` over its own groups, as one optimizer.

    Muon (Jordan, https://kellerjordan.github.io/posts/muon) takes steps whose singular values are
    all about 1: the momentum of a matrix, made orthogonal. Scaled by 0.2 √max(rows, columns) (Liu
    et al., arXiv 2502.16982, section 2.2) they are as long as AdamW's, so that rates and weight
    decay mean the same. `torch.optim.Muon` computes this too, but not where the parameters are
    shards, and it cannot leave out a step without waiting for the device.

    As fused AdamW does, it takes no step where `found_inf` is 1, which is decided on the device.
    Call `step` on all ranks: each makes its share of the matrices orthogonal.
    """

    def __init__(self, matrices: dict[str, Any], adamw: torch.optim.AdamW, world: World) -> None:
        self._adamw, self._world = adamw, world
        self.found_inf = torch.zeros((), device=world.device)
        super().__init__([matrices, *adamw.param_groups], {"lr": adamw.defaults["lr"]})
        self._share_state()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the groups and the state, as `load_state_dict` does."""
        super().__setstate__(state)
        self._share_state()

    def _share_state(self) -> None:
        self._adamw.state, self._adamw.param_groups = self.state, self.param_groups[1:]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take a step with the gradients, unless `found_inf` is 1."""
        group = self.param_groups[0]
        rate = group["lr"] * (1.0 - self.found_inf)
        for matrices in self._batches(group["params"]):
            for matrix, update in zip(matrices, self._updates(matrices), strict=True):
                own = local_shard(matrix)
                own.mul_(1.0 - rate * group["weight_decay"])
                length = 0.2 * math.sqrt(max(matrix.shape))
                own.addcmul_(shard_of(update, matrix).to(own.dtype), rate * length, value=-1)
        self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._adamw.step()

    def _batches(self, matrices: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Divide the matrices into batches of one shape."""
        for shape in dict.fromkeys(matrix.shape for matrix in matrices):
            alike = [matrix for matrix in matrices if matrix.shape == shape]
            count = self._world.size * max(1, NUMBERS_AT_ONCE // math.prod(shape))
            for first in range(0, len(alike), count):
                yield alike[first : first + count]

    def _updates(self, matrices: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the orthogonal update of each of a batch, on all ranks; one of them computes it."""
        world, own = self._world, list[Tensor]()
        for index, matrix in enumerate(matrices):
            momentum = self._momentum(matrix)
            if index % world.size == world.rank:
                own.append(momentum)
        orthogonal = iter(orthogonalize(torch.stack(own)) if own else ())
        for index, matrix in enumerate(matrices):
            like = torch.empty(matrix.shape, dtype=torch.bfloat16, device=world.device)
            yield world.broadcast_tensor(lambda: next(orthogonal), like, source=index % world.size)

    def _momentum(self, matrix: Tensor) -> Tensor:
        """Update the momentum of a matrix; return Nesterov's, [rows, columns] in bfloat16."""
        if not self.state[matrix]:
            self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        buffer, gradient = self.state[matrix]["momentum_buffer"], matrix.grad
        assert gradient is not None  # noqa: S101 - a layer uses all of its matrices
        own, new = local_shard(buffer), local_shard(gradient)
        new = torch.where(self.found_inf > 0, own, new)
        own.lerp_(new, 1 - MOMENTUM)
        nesterov = torch.empty_like(buffer, dtype=torch.bfloat16)
        local_shard(nesterov).copy_(new.lerp(own, MOMENTUM))
        return full_tensor(nesterov)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Replace the singular values of [N, rows, columns] matrices by about 1: 0.7 to 1.2.

    By Newton and Schulz's iteration, with the polynomial of Jordan (see `Muon`).
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).contiguous()


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
