"""The compressive memory: what a layer keeps of all finished segments, and how it is written.

Two rules of "Leave No Context Behind" (arXiv 2404.07143) say how: `linear` (equation 8) adds what a
segment says, `delta` (equation 9) first takes away what the memory already says under the same
keys. Neither loops over the segments of a sequence. Under the linear rule the memory before a
segment is a prefix sum. Under the delta rule a segment changes the memory by an affine map, which
depends on the normaliser alone, itself a prefix sum; so all maps are known at once and are
composed.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from infini_model.model.kernels.memory_ops import key_value_sums
from infini_model.model.kernels.numerics import NOTHING_FOUND, memory_dtype

Update = Literal["linear", "delta"]


class Memory(NamedTuple):
    """What a layer remembers of all finished segments: constant in size.

    Attributes:
        kv: Values filed under σ(K), [B, H_kv, D, D], float32 (float64 for float64).
        norm: Σσ(K) over what was written, [B, H_kv, D], of the same dtype.
    """

    kv: Tensor
    norm: Tensor

    @classmethod
    def empty(
        cls, batch: int, heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> Memory:
        """A memory that nothing was written to, for activations of `dtype`."""
        exact = memory_dtype(dtype)
        return cls(
            torch.zeros(batch, heads, head_dim, head_dim, dtype=exact, device=device),
            torch.zeros(batch, heads, head_dim, dtype=exact, device=device),
        )


def feature_map(x: Tensor) -> Tensor:
    """σ = ELU + 1 (paper, below equation 4), in the memory's dtype.

    Written as relu(x) + exp(min(x, 0)): `elu(x) + 1` loses every digit where exp(x) is small.
    """
    x = x.to(memory_dtype(x.dtype))
    return functional.relu(x) + x.clamp(max=0).exp()


def memory_states(
    keys: Tensor, values: Tensor, first: Memory, reset: Tensor | None, update: Update
) -> Memory:
    """The memory before each segment and, last, after all of them.

    Args:
        keys: Keys of N segments, [B, N, H_kv, L, D].
        values: Values, of the same shape.
        first: The memory before segment 0.
        reset: [B, N + 1] bool, true where the memory is emptied before it is read.
        update: The rule by which a segment is written.

    Returns:
        kv [B, N + 1, H_kv, D, D] and norm [B, N + 1, H_kv, D].
    """
    sums = key_value_sums(keys.flatten(0, 1), values.flatten(0, 1))
    added = Memory(*(x.view(*keys.shape[:2], *x.shape[1:]) for x in sums))
    kv, norm = (
        torch.cat((start.unsqueeze(1), new), dim=1) for start, new in zip(first, added, strict=True)
    )
    norm = _prefix_sums(norm, reset)
    if update == "linear":
        return Memory(_prefix_sums(kv, reset), norm)
    with torch.autocast(keys.device.type, enabled=False):
        kept = _kept(feature_map(keys), norm[:, :-1], added.norm)
        # What stands before the first memory does not matter: nothing of it is kept.
        kept = torch.cat((torch.zeros_like(kv[:, :1]), kept), dim=1)
        return Memory(_compose(kept, kv, reset), norm)


def update_memory(memory: Memory, keys: Tensor, values: Tensor, update: Update) -> Memory:
    """The memory after one segment of keys and values [B, H_kv, L, D] more."""
    after = memory_states(keys.unsqueeze(1), values.unsqueeze(1), memory, None, update)
    return Memory(after.kv[:, 1], after.norm[:, 1])


def _kept(features: Tensor, norm: Tensor, added: Tensor) -> Tensor:
    """The part of the memory that the delta rule keeps: A = I − σ(K)ᵀ diag(1/n) σ(K).

    In equation 9 a key takes away what it reads, n = σ(k)·z, where z is the normaliser before the
    segment. All keys of a segment do so at the same time: where the segment's own mass Σσ(K)
    exceeds z, together they take away more than there is, A has eigenvalues below −1, and the
    memory grows without bound. So n = max(σ(k)·z, σ(k)·Σσ(K)) here. Then σ(K)ᵀ diag(1/n) σ(K),
    which is symmetric and maps the positive vector Σσ(K) to at most itself, has its eigenvalues in
    [0, 1], and so has A: no segment, however long, can make the memory grow but by what it adds.
    Where z outweighs the segment this is the paper's rule exactly.

    Args:
        features: σ(K), [..., L, D].
        norm: z, [..., D].
        added: Σσ(K), [..., D].

    Returns:
        [..., D, D].
    """
    mass = features @ torch.stack((norm, added), dim=-1)
    mass = mass.amax(dim=-1, keepdim=True)
    found = mass > NOTHING_FOUND
    shares = torch.where(found, features / torch.where(found, mass, 1.0), 0.0)
    identity = torch.eye(features.size(-1), dtype=features.dtype, device=features.device)
    return identity - features.mT @ shares


def _prefix_sums(x: Tensor, starts: Tensor | None) -> Tensor:
    """Inclusive sums of `x` [B, N, ...] over N that begin anew where `starts` [B, N] is true.

    A start empties what it stands at, too. With starts, sums over 1, 2, 4, … neighbours are joined,
    and a sum that would cross a start is left out instead of being subtracted later, so that
    nothing of it remains, not even rounding.
    """
    if starts is None:
        return x.cumsum(dim=1)
    crosses = starts.reshape(*starts.shape, *[1] * (x.dim() - 2))
    x = x.masked_fill(crosses, 0.0)
    distance = 1
    while distance < x.size(1):
        carried = x[:, :-distance].masked_fill(crosses[:, distance:], 0.0)
        x = torch.cat((x[:, :distance], x[:, distance:] + carried), dim=1)
        joined = crosses[:, distance:] | crosses[:, :-distance]
        crosses = torch.cat((crosses[:, :distance], joined), dim=1)
        distance *= 2
    return x


def _compose(kept: Tensor, added: Tensor, starts: Tensor | None) -> Tensor:
    """All states of M_i = kept_i M_{i−1} + added_i; the one before the first counts for nothing.

    The maps are composed in about √N stretches of about √N at once, then from stretch to stretch:
    2√N dependent steps and three products a map, where one map after the other takes N steps and
    one product, and joining neighbours log₂ N steps and 2 log₂ N products.

    Args:
        kept: [B, N, H_kv, D, D].
        added: Of the same shape.
        starts: [B, N] bool, true where the state is emptied after the map.

    Returns:
        [B, N, H_kv, D, D].
    """
    count = added.size(1)
    width = math.isqrt(count - 1) + 1
    if starts is None:
        starts = torch.zeros(added.shape[:2], dtype=torch.bool, device=added.device)
    behind = -count % width
    # What is padded is behind the last state, which nobody reads.
    kept, added = (functional.pad(x, (0, 0) * 3 + (0, behind)) for x in (kept, added))
    starts = functional.pad(starts, (0, behind))[..., None, None, None]
    stretches = [
        x.reshape(x.size(0), -1, width, *x.shape[2:]).unbind(2) for x in (kept, added, starts)
    ]

    through: list[Tensor] = []
    state: list[Tensor] = []
    cut: list[Tensor] = []
    for a, b, start in zip(*stretches, strict=True):
        through.append((a @ through[-1] if through else a).masked_fill(start, 0.0))
        state.append((a @ state[-1] + b if state else b).masked_fill(start, 0.0))
        cut.append(cut[-1] | start if cut else start)
    entering = [torch.zeros_like(state[0][:, 0])]
    for a, b, start in zip(*(x[-1].unbind(1) for x in (through, state, cut)), strict=True):
        entering.append(torch.where(start, b, a @ entering[-1] + b))
    inside, before = torch.stack(state, dim=2), torch.stack(entering[:-1], dim=1).unsqueeze(2)
    # Nothing of what stood before a start may come behind it, not even as 0 · ∞.
    joined = torch.where(
        torch.stack(cut, dim=2), inside, torch.stack(through, dim=2) @ before + inside
    )
    return joined.flatten(1, 2)[:, :count]
