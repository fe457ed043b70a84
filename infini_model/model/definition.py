"""The definition of Infini-attention ("Leave No Context Behind", arXiv 2404.07143) as a plain loop.

`infini_model.model.attention.infini_attention` computes the same for all segments at once; tests
compare its results and all gradients with this one, which is not used for training.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

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
) -> tuple[Tensor, Memory]:
    """`infini_attention`, segment by segment: same arguments and result, all of one dtype."""
    group = q.size(1) // k.size(1)
    if memory is None:
        memory = Memory.empty(k.size(0), k.size(1), k.size(3), dtype=q.dtype, device=q.device)
    kv, norm, out = memory.kv, memory.norm.unsqueeze(-1), []
    for number, start in enumerate(range(0, q.size(2), segment_length)):
        segment = slice(start, start + segment_length)
        if reset is not None:
            kept = ~reset[:, number].view(-1, 1, 1, 1)
            kv, norm = kv * kept, norm * kept
        query, value = q[:, :, segment], v[:, :, segment]
        local = _softmax_attention(query, k[:, :, segment], value, rope)  # equation 2
        sigma_q = functional.elu(query) + 1
        mass = sigma_q @ norm.repeat_interleave(group, 1)
        nonempty = mass > 0
        read = sigma_q @ kv.repeat_interleave(group, 1) / mass.where(nonempty, 1)  # equation 7
        share = gate.sigmoid().view(-1, 1, 1)
        out.append(torch.where(nonempty, share * read + (1 - share) * local, local))  # equation 10
        if start + segment_length <= q.size(2):
            key = (k if memory_keys is None else memory_keys)[:, :, segment]
            sigma_k = functional.elu(key) + 1
            added = sigma_k.sum(2).unsqueeze(-1)
            if update == "delta":  # equation 9, with a bounded divisor: see `memory`
                value = value - sigma_k @ kv / torch.maximum(sigma_k @ norm, sigma_k @ added)
            kv, norm = kv + sigma_k.mT @ value, norm + added  # equation 8
    return torch.cat(out, 2), Memory(kv, norm.squeeze(-1))


def _softmax_attention(query: Tensor, key: Tensor, value: Tensor, rope: Rope | None) -> Tensor:
    """Causal attention inside one segment."""
    if rope is not None:
        rope = (rope[0][: query.size(2)], rope[1][: query.size(2)])
        query, key = rotate(query, rope), rotate(key, rope)
    key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
    scores = query @ key.mT / math.sqrt(query.size(3))
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1) @ value
