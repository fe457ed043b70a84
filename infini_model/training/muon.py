"""Muon for the matrices of the layers, and AdamW for all other parameters, as one optimizer.

Muon (Jordan, https://kellerjordan.github.io/posts/muon) takes steps whose singular values are all
about 1: the momentum of a matrix, made orthogonal. Scaled by 0.2 √max(rows, columns) (Liu et al.,
arXiv 2502.16982, section 2.2) they are as long as AdamW's, so that rates and weight decay mean the
same. `torch.optim.Muon` computes this too, but not where the parameters are shards, and it cannot
leave out a step without waiting for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from infini_model.training.distributed import World
from infini_model.training.parallel import full_tensor, local_shard, shard_of

MOMENTUM = 0.95
# Of the polynomial that takes singular values towards 1, and how often it is applied.
COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
# Many small matrices at once keep a GPU busy; more numbers than this would only take memory.
NUMBERS_AT_ONCE = 2**24


class Muon(torch.optim.Optimizer):
    """Muon over the group `matrices`, and `adamw` over its own groups.

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

    By Newton and Schulz's iteration, with the polynomial of Jordan (see above).
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).contiguous()
