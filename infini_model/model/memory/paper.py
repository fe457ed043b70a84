"""The memory of the paper ("Leave No Context Behind", arXiv 2404.07143), in plain PyTorch.

With σ = ELU + 1, a segment of Q, K, V reads and writes

    A_mem   = σ(Q) M / σ(Q) z                               the memory before it (eq. 7)
    out     = s · A_mem + (1 − s) · A_local                 s = sigmoid(read_weight) (eq. 10)
    M, z    ← M + σ(K)ᵀ V, z + Σ σ(K)                       (eq. 8)

or it writes by a bounded form of the delta rule (eq. 9), for keys that are written again. It is
here for who reproduces the paper; the default is the residual memory.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from infini_model.config import ModelConfig
from infini_model.model.kernels.memory_ops import grouped_rows, memory_dtype
from infini_model.model.kernels.scan import exclusive_scan
from infini_model.model.memory.rule import Memory, Rule

# Below this normaliser σ(q)·z a read counts as empty: the memory is empty, or every product of
# features has underflowed. Its square is well inside float32's range, so dividing by a larger
# normaliser cannot overflow, nor can the gradient of that division.
EMPTY_MASS = 1e-18


def feature_map(x: Tensor) -> Tensor:
    """σ = ELU + 1, in the memory's dtype.

    Computed as relu(x) + exp(min(x, 0)): `elu(x) + 1` cancels where exp(x) is small. The slope of
    x − relu(x) at 0 is 1; that of `clamp` is 1 in PyTorch 2.13 and 0 in 2.15.
    """
    x = x.to(memory_dtype(x.dtype))
    positive = functional.relu(x)
    return positive + (x - positive).exp()


class Linear(Rule):
    """A memory to which each segment adds its values (equation 8)."""

    parameter_names = ("gate",)
    is_normalised = True
    activations, states_kept = 4, 1

    @staticmethod
    def start(config: ModelConfig) -> dict[str, Tensor]:
        """All heads at `read_weight_start`."""
        return {"gate": torch.full((config.num_attention_heads,), config.read_weight_start)}

    @staticmethod
    def strength(read_weight: Tensor) -> Tensor:
        """The share of the memory in the output."""
        return read_weight.float().sigmoid()

    @classmethod
    def states(
        cls,
        keys: Tensor,
        values: Tensor,
        gates: Tensor | None,  # noqa: ARG003 - has none
        first: Memory,
        starts: Tensor | None,
    ) -> Memory:
        """As `Rule.states`: prefix sums."""
        with torch.autocast(keys.device.type, enabled=False):
            features = feature_map(keys)
            added, added_norm = features.mT @ values.to(features.dtype), features.sum(3)
            norm = exclusive_scan(added_norm, first.norm, starts)
            kept = cls._kept(features, norm[:, :-1], added_norm)
            if kept is None:
                return Memory(exclusive_scan(added, first.kv, starts), norm)
            return Memory(_multiplied_states(kept, added, first.kv, starts), norm)

    @staticmethod
    def _kept(features: Tensor, norm: Tensor, added: Tensor) -> Tensor | None:  # noqa: ARG004
        """What each segment multiplies M by, [B, N, H_kv, D, D]; `added` is to z. None is 1."""
        return None

    @staticmethod
    def read(q: Tensor, local: Tensor, read_weight: Tensor, memory: Memory) -> Tensor:
        """As `Rule.read`; `read_weight` is before the sigmoid, [H]."""
        kv, norm = memory.kv, cast("Tensor", memory.norm)
        with torch.autocast(q.device.type, enabled=False):
            features = grouped_rows(feature_map(q), kv)
            mass = (features @ norm.unsqueeze(-1)).view(*q.shape[:3], 1)
            nonempty = mass > EMPTY_MASS
            share = nonempty * read_weight.to(norm.dtype).sigmoid().view(-1, 1, 1)
            read = (features @ kv).view_as(q) * (share / torch.where(nonempty, mass, 1.0))
            return (local * (1.0 - share) + read).to(local.dtype)


class Delta(Linear):
    """A memory in which a segment first removes what it holds under its keys (equation 9).

    In the paper each key subtracts what it reads, divided by n = σ(k)·z, with z before the segment.
    All keys of a segment do so at once. Where Σσ(K) of the segment exceeds z, together they
    subtract more than the memory holds: I − σ(K)ᵀ diag(1/n) σ(K) has eigenvalues below −1, and the
    memory grows without bound. So here n = max(σ(k)·z, σ(k)·Σσ(K)). Then σ(K)ᵀ diag(1/n) σ(K),
    which is symmetric and maps the positive vector Σσ(K) to at most itself, has its eigenvalues in
    [0, 1]: however long a segment is, the memory grows by at most what the segment adds. Where z
    outweighs the segment this is exactly the paper's rule.
    """

    activations, states_kept = 7, 7

    @staticmethod
    def _kept(features: Tensor, norm: Tensor, added: Tensor) -> Tensor:
        mass = (features @ torch.stack((norm, added), dim=-1)).amax(dim=-1, keepdim=True)
        nonempty = mass > EMPTY_MASS
        shares = torch.where(nonempty, features / torch.where(nonempty, mass, 1.0), 0.0)
        identity = torch.eye(features.size(-1), dtype=features.dtype, device=features.device)
        return identity - features.mT @ shares


def _multiplied_states(kept: Tensor, added: Tensor, first: Tensor, starts: Tensor | None) -> Tensor:
    """As `exclusive_scan`, for factors that are matrices."""
    states = [first]
    for segment in range(added.size(1) + 1):
        if segment:
            states.append(kept[:, segment - 1] @ states[-1] + added[:, segment - 1])
        if starts is not None:
            states[-1] = states[-1].masked_fill(starts[:, segment, None, None, None], 0.0)
    return torch.stack(states, 1)
