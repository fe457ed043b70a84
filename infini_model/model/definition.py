"""The definition of Infini-attention ("Leave No Context Behind", arXiv 2404.07143) as a plain loop.

Beside the paper's rules stands the residual memory: features made of two softmaxes (Hedgehog, arXiv
2402.04347), written without a normaliser and with two gates of each token, one for what it adds and
one for what is older; what is read is normed, weighed, and added to the local attention.

`infini_model.model.attention.infini_attention` computes the same for all segments at once; tests
compare its results and all gradients with this one, which is not used for training.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from infini_model.model.kernels.memory_ops import READ_EPSILON, SHARPNESS
from infini_model.model.memory import Memory, Update
from infini_model.model.rotary import Rope, rotate


def attention_by_segment(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    *,
    segment_length: int,
    rope: Rope | None = None,
    memory: Memory | None = None,
    update: Update = "linear",
    reset: Tensor | None = None,
    memory_keys: Tensor | None = None,
    memory_values: Tensor | None = None,
    memory_queries: Tensor | None = None,
    memory_gates: Tensor | None = None,
    causal: bool = True,
) -> tuple[Tensor, Memory]:
    """`infini_attention`, segment by segment: same arguments and result, all of one dtype."""
    group = q.size(1) // k.size(1)
    keys = k if memory_keys is None else memory_keys
    values = v if memory_values is None else memory_values
    queries = q if memory_queries is None else memory_queries
    if memory_gates is None:
        memory_gates = keys.new_tensor((1.0, 0.0)).expand(*keys.shape[:3], 2)
    streams = len(q) // len(keys)
    if memory is None:
        memory = Memory.empty(
            update, len(keys), k.size(1), k.size(3), dtype=q.dtype, device=q.device
        )
    kv, norm, out = memory.kv, memory.norm, []
    for number, start in enumerate(range(0, q.size(2), segment_length)):
        segment = slice(start, start + segment_length)
        if reset is not None:
            kept = ~reset[:, number].view(-1, 1, 1, 1)
            kv, norm = kv * kept, None if norm is None else norm * kept[..., 0]
        query, key, value = (x[:, :, segment] for x in (q, k, v))
        local = _softmax_attention(query, key, value, rope, causal=causal)  # equation 2
        reading, writing, value = queries[:, :, segment], keys[:, :, segment], values[:, :, segment]
        is_full = start + segment_length <= q.size(2)
        held = kv.repeat_interleave(group, 1).repeat(streams, 1, 1, 1)
        if norm is None:
            read = _two_softmaxes(reading) @ held
            read = read / (read.square().mean(-1, keepdim=True) + READ_EPSILON).sqrt()
            out.append(local + gate.unsqueeze(1) * read)
            if is_full:
                for features, row, gates in zip(
                    _two_softmaxes(writing).unbind(2),
                    value.unbind(2),
                    memory_gates[:, :, segment].unbind(2),
                    strict=True,
                ):
                    scale, fading = gates[..., None, None].unbind(2)
                    kv = fading.exp() * kv + scale * features.unsqueeze(-1) * row.unsqueeze(-2)
            continue
        sigma_q = functional.elu(reading) + 1
        total = norm.repeat_interleave(group, 1).repeat(streams, 1, 1)
        mass = sigma_q @ total.unsqueeze(-1)
        nonempty = mass > 0
        read = sigma_q @ held / mass.where(nonempty, 1)  # equation 7
        share = gate.sigmoid().view(-1, 1, 1)
        out.append(torch.where(nonempty, share * read + (1 - share) * local, local))  # equation 10
        if is_full:
            sigma_k = functional.elu(writing) + 1
            added = sigma_k.sum(2)
            if update == "delta":  # equation 9, with a bounded divisor: see `memory`
                bound = torch.maximum(*(sigma_k @ x.unsqueeze(-1) for x in (norm, added)))
                value = value - sigma_k @ kv / bound
            kv, norm = kv + sigma_k.mT @ value, norm + added  # equation 8
    return torch.cat(out, 2), Memory(kv, norm)


def _two_softmaxes(x: Tensor) -> Tensor:
    """The features of a residual memory, [..., 2 D] of x [..., D]."""
    x = SHARPNESS * x
    return torch.cat((x.softmax(-1), (-x).softmax(-1)), -1)


def _softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, rope: Rope | None, *, causal: bool
) -> Tensor:
    """Attention inside one segment, to its preceding positions or to all of them."""
    if rope is not None:
        rope = (rope[0][: query.size(2)], rope[1][: query.size(2)])
        query, key = rotate(query, rope), rotate(key, rope)
    key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
    scores = query @ key.mT / math.sqrt(query.size(3))
    if causal:
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return scores.softmax(-1) @ value
