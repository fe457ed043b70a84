"""The compressive memory of all full segments, and the three rules by which they are written.

Under the `linear` rule ("Leave No Context Behind", arXiv 2404.07143, equation 8) a segment adds its
values; under the `delta` rule (equation 9) it first subtracts what the memory returns for its keys.
`infini_model.model.definition` states both as a loop over segments. Here neither needs that loop.
Under the linear rule the memory before a segment is a prefix sum. Under the delta rule each segment
applies an affine map to the memory. The maps depend only on the normaliser, which is a prefix sum,
so all of them are known at once and can be composed in parallel.

The `residual` rule is the linear one with other features, of twice the width, and no normaliser;
see `infini_model.model.kernels.memory_ops`. Each token may also let the memory fade (Gated
DeltaNet, arXiv 2412.06464): by a product over its segment, so that the memory before a segment is
still a sum over the earlier ones, each multiplied by what the later ones keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from infini_model.model.kernels.memory_ops import (
    EMPTY_MASS,
    feature_map,
    key_value_sums,
    memory_dtype,
    residual_sums,
)
from infini_model.model.kernels.scan import exclusive_scan

Update = Literal["linear", "delta", "residual"]


class Memory(NamedTuple):
    """The memory of one layer: M and z of the paper, constant in size.

    Attributes:
        kv: M = Σσ(k)ᵀv over all written tokens, [B, H_kv, D, D], float32 (float64 for float64); of
            the residual rule S = Σβφ(k)ᵀv, which fades, [B, H_kv, 2 D, D].
        norm: z = Σσ(k), the normaliser, [B, H_kv, D], of the same dtype; None of the residual rule.
    """

    kv: Tensor
    norm: Tensor | None

    @classmethod
    def empty(
        cls,
        update: Update,
        batch: int,
        heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Memory:
        """A memory of zeros, for activations of `dtype`."""
        norm = torch.zeros(batch, heads, head_dim, dtype=memory_dtype(dtype), device=device)
        if update == "residual":
            return cls(norm.new_zeros(batch, heads, 2 * head_dim, head_dim), None)
        return cls(norm.new_zeros(batch, heads, head_dim, head_dim), norm)

    def map(self, function: Callable[..., Tensor], *others: Memory) -> Memory:
        """The results of `function`, called with the parts of this memory and of others like it."""
        norms = [each.norm for each in (self, *others) if each.norm is not None]
        kv = function(*(each.kv for each in (self, *others)))
        return Memory(kv, function(*norms) if norms else None)

    @property
    def parts(self) -> list[Tensor]:
        """`kv`, and `norm` if there is one."""
        return [self.kv] if self.norm is None else [self.kv, self.norm]


def memory_states(
    keys: Tensor,
    values: Tensor,
    first: Memory,
    reset: Tensor | None,
    update: Update,
    gates: Tensor | None = None,
) -> tuple[Memory, Memory]:
    """The memory before each segment, and that after the last.

    Args:
        keys: Keys of N segments, [B, N, H_kv, L, D].
        values: Values, of the same shape.
        first: The memory before segment 0.
        reset: [B, N + 1] bool, true where the memory is emptied before it is read; None is never.
        update: How a segment is written.
        gates: `memory_gates` of `infini_attention`, by segment, [B, N, H_kv, L, 2].

    Returns:
        The memory before each segment, with a dimension of N after the first, and after the last.
    """
    rows, pairs = keys.shape[:2], (keys.flatten(0, 1), values.flatten(0, 1))
    if update == "residual":
        if gates is None:
            scale, kept = keys.new_ones(keys.shape[:-1], dtype=first.kv.dtype), None
        else:
            scale, fading = gates.unbind(-1)
            # What is left of what a token writes is what the later ones of its segment keep.
            scale, kept = scale * _sums_of_later(fading).exp(), fading.sum(-1).exp()
        sums = residual_sums(*pairs, scale.flatten(0, 1))
        kv, last_kv = exclusive_scan(sums.view(*rows, *sums.shape[1:]), first.kv, reset, kept)
        return Memory(kv, None), Memory(last_kv, None)
    added_kv, added_norm = (x.view(*rows, *x.shape[1:]) for x in key_value_sums(*pairs))
    norm, last_norm = exclusive_scan(added_norm, first.norm, reset)
    if update == "linear":
        kv, last_kv = exclusive_scan(added_kv, first.kv, reset)
        return Memory(kv, norm), Memory(last_kv, last_norm)
    with torch.autocast(keys.device.type, enabled=False):
        kept = _retention(feature_map(keys), norm, added_norm)
        written = torch.cat((first.kv.unsqueeze(1), added_kv), dim=1)
        # The first map keeps nothing, so `first` is the first state.
        kept = torch.cat((torch.zeros_like(written[:, :1]), kept), dim=1)
        states = _compose(kept, written, reset)
        return Memory(states[:, :-1], norm), Memory(states[:, -1], last_norm)


def update_memory(
    memory: Memory, keys: Tensor, values: Tensor, update: Update, gates: Tensor | None
) -> Memory:
    """The memory after one more segment of keys and values [B, H_kv, L, D]."""
    gates = None if gates is None else gates.unsqueeze(1)
    _, after = memory_states(keys.unsqueeze(1), values.unsqueeze(1), memory, None, update, gates)
    return after


def _sums_of_later(x: Tensor) -> Tensor:
    """For each number of the last dimension the sum of those after it.

    By products with triangles, as CUDA's `cumsum` is not deterministic: inside about √L blocks of
    about √L, and of these.
    """
    length = x.size(-1)
    width = math.isqrt(length - 1) + 1
    count = math.ceil(length / width)
    blocks = functional.pad(x, (0, -length % width)).reshape(*x.shape[:-1], count, width)
    with torch.autocast(x.device.type, enabled=False):
        inside = blocks @ x.new_ones(width, width).tril(-1)
        beyond = blocks.sum(-1) @ x.new_ones(count, count).tril(-1)
    return (inside + beyond.unsqueeze(-1)).flatten(-2)[..., :length]


def _retention(features: Tensor, norm: Tensor, added: Tensor) -> Tensor:
    """The matrix that the delta rule applies to the memory: A = I − σ(K)ᵀ diag(1/n) σ(K).

    In equation 9 each key subtracts what it reads, with n = σ(k)·z, z being the normaliser before
    the segment. All keys of a segment do so at once. Where Σσ(K) of the segment exceeds z, together
    they subtract more than the memory holds: A has eigenvalues below −1, and the memory grows
    without bound. So here n = max(σ(k)·z, σ(k)·Σσ(K)). Then σ(K)ᵀ diag(1/n) σ(K), which is
    symmetric and maps the positive vector Σσ(K) to at most itself, has its eigenvalues in [0, 1],
    and so has A: however long a segment is, the memory grows by at most what the segment adds.
    Where z outweighs the segment this is exactly the paper's rule.

    Args:
        features: σ(K), [..., L, D].
        norm: z, [..., D].
        added: Σσ(K), [..., D].

    Returns:
        [..., D, D].
    """
    mass = features @ torch.stack((norm, added), dim=-1)
    mass = mass.amax(dim=-1, keepdim=True)
    nonempty = mass > EMPTY_MASS
    shares = torch.where(nonempty, features / torch.where(nonempty, mass, 1.0), 0.0)
    identity = torch.eye(features.size(-1), dtype=features.dtype, device=features.device)
    return identity - features.mT @ shares


def _compose(kept: Tensor, added: Tensor, reset: Tensor | None) -> Tensor:
    """All states of the recurrence M_i = kept_i M_{i−1} + added_i, from M_{−1} = 0.

    The maps are composed inside about √N blocks of about √N, all blocks in parallel, then from
    block to block. That takes 2√N dependent steps and three products per map; the plain recurrence
    takes N steps and one product, and composition by doubling log₂ N steps and 2 log₂ N products.

    Args:
        kept: [B, N, H_kv, D, D].
        added: Of the same shape.
        reset: [B, N] bool, true where the state is emptied after the map.

    Returns:
        [B, N, H_kv, D, D].
    """
    count = added.size(1)
    width = math.isqrt(count - 1) + 1
    if reset is None:
        reset = torch.zeros(added.shape[:2], dtype=torch.bool, device=added.device)
    padding = -count % width
    kept, added = (functional.pad(x, (0, 0) * 3 + (0, padding)) for x in (kept, added))
    reset = functional.pad(reset, (0, padding))[..., None, None, None]
    blocks = [x.reshape(x.size(0), -1, width, *x.shape[2:]).unbind(2) for x in (kept, added, reset)]

    # Inside each block: the product of its maps so far, the state from zero, and any reset so far.
    products: list[Tensor] = []
    states: list[Tensor] = []
    resets: list[Tensor] = []
    for a, b, emptied in zip(*blocks, strict=True):
        products.append((a @ products[-1] if products else a).masked_fill(emptied, 0.0))
        states.append((a @ states[-1] + b if states else b).masked_fill(emptied, 0.0))
        resets.append(resets[-1] | emptied if resets else emptied)
    # From block to block: the state that enters each.
    entering = [torch.zeros_like(states[0][:, 0])]
    for a, b, emptied in zip(*(x[-1].unbind(1) for x in (products, states, resets)), strict=True):
        entering.append(torch.where(emptied, b, a @ entering[-1] + b))
    inside, before = torch.stack(states, dim=2), torch.stack(entering[:-1], dim=1).unsqueeze(2)
    # A select, not a product with 0: what precedes a reset may be infinite.
    joined = torch.where(
        torch.stack(resets, dim=2), inside, torch.stack(products, dim=2) @ before + inside
    )
    return joined.flatten(1, 2)[:, :count]
