"""Reference of `infini_attention`: a plain loop over segments.

A window of exact attention, and Infini-attention ("Leave No Context Behind", arXiv 2404.07143) to
everything older. Beside the paper's rules there is the residual memory: features made of two
softmaxes (Hedgehog, arXiv 2402.04347), written without a normaliser and with two gates of each
token, one for what it adds and one for what is older; what is read is normed, weighed, and added.

`infini_model.model.attention.infini_attention` computes the same for all segments at once. What a
causal model needs of it is also in `infini_model/hf/modeling_infini_llama.py`, which exports carry.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from infini_model.model.kernels.memory_ops import READ_EPSILON, SHARPNESS
from infini_model.model.memory import RULES, Memory
from infini_model.model.rotary import Rope, rotate


def attention_by_segment(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    read_weight: Tensor,
    *,
    segment_length: int,
    rope: Rope | None = None,
    memory: Memory | None = None,
    update: str = "linear",
    document_starts: Tensor | None = None,
    memory_keys: Tensor | None = None,
    memory_values: Tensor | None = None,
    memory_queries: Tensor | None = None,
    memory_gates: Tensor | None = None,
    causal: bool = True,
    window_segments: int = 0,
    window_sinks: int = 0,
) -> tuple[Tensor, Memory]:
    """`infini_attention`, segment by segment: same arguments and result, all of one dtype."""
    group = q.size(1) // k.size(1)
    keys = k if memory_keys is None else memory_keys
    values = v if memory_values is None else memory_values
    queries = q if memory_queries is None else memory_queries
    if memory_gates is None:
        memory_gates = keys.new_tensor((1.0, 0.0)).expand(*keys.shape[:3], 2)
    rows = len(keys)
    streams = len(q) // rows
    if memory is None:
        memory = RULES[update].empty(keys)
    kv, norm, out, begins = memory.kv, memory.norm, [], [0] * rows
    for number, start in enumerate(range(0, q.size(2), segment_length)):
        segment = slice(start, start + segment_length)
        if document_starts is not None:
            kept = ~document_starts[:, number].view(-1, 1, 1, 1)
            kv, norm = kv * kept, None if norm is None else norm * kept[..., 0]
            starting = document_starts[:, number].tolist()
            begins = [start if new else old for new, old in zip(starting, begins, strict=True)]
        local = torch.stack(
            [
                _in_sight(
                    (q[row, :, segment], k[row, :, segment], v[row, :, segment]),
                    [x[row % rows, :, begins[row % rows] : start] for x in (k, v)],
                    (segment_length, window_segments, window_sinks),
                    rope,
                    causal=causal,
                )
                for row in range(len(q))
            ]
        )
        reading, writing, value = queries[:, :, segment], keys[:, :, segment], values[:, :, segment]
        is_full = start + segment_length <= q.size(2)
        held = kv.repeat_interleave(group, 1).repeat(streams, 1, 1, 1)
        if norm is None:
            read = _two_softmaxes(reading) @ held
            read = read / (read.square().mean(-1, keepdim=True) + READ_EPSILON).sqrt()
            out.append(local + read_weight.unsqueeze(1) * read)
            if is_full:
                for features, row, gates in zip(
                    _two_softmaxes(writing).unbind(2),
                    value.unbind(2),
                    memory_gates[:, :, segment].unbind(2),
                    strict=True,
                ):
                    write_share, log_keep = gates[..., None, None].unbind(2)
                    written = write_share * features[..., None] * row[..., None, :]
                    kv = log_keep.exp() * kv + written
            continue
        sigma_q = functional.elu(reading) + 1
        total = norm.repeat_interleave(group, 1).repeat(streams, 1, 1)
        mass = sigma_q @ total.unsqueeze(-1)
        nonempty = mass > 0
        read = sigma_q @ held / mass.where(nonempty, 1)  # equation 7
        share = read_weight.sigmoid().view(-1, 1, 1)
        out.append(torch.where(nonempty, share * read + (1 - share) * local, local))  # equation 10
        if is_full:
            sigma_k = functional.elu(writing) + 1
            added = sigma_k.sum(2)
            if update == "delta":  # equation 9, with a bounded divisor: see `Delta`
                bound = torch.maximum(*(sigma_k @ x.unsqueeze(-1) for x in (norm, added)))
                value = value - sigma_k @ kv / bound
            kv, norm = kv + sigma_k.mT @ value, norm + added  # equation 8
    return torch.cat(out, 2), Memory(kv, norm)


def _two_softmaxes(x: Tensor) -> Tensor:
    """The features of a residual memory, [..., 2 D] of x [..., D]."""
    x = SHARPNESS * x
    return torch.cat((x.softmax(-1), (-x).softmax(-1)), -1)


def _in_sight(
    own: tuple[Tensor, Tensor, Tensor],
    before: list[Tensor],
    window: tuple[int, int, int],
    rope: Rope | None,
    *,
    causal: bool,
) -> Tensor:
    """Attention of a segment to its window, in one row (equation 2 if that is the segment).

    `own` are the segment's queries [H, L, D], keys and values [H_kv, L, D], `before` keys and
    values [H_kv, T, D] of its document before it, `window` is (segment_length, window_segments,
    window_sinks).
    """
    (q, k, v), (length, segments, sinks) = own, window
    older, near = before[0].size(1), segments * length
    seen = [*range(max(0, older - near), older)]
    places = [position - older for position in seen]
    if older > near:
        first = [*range(sinks)]
        seen, places = first + seen, [position - near - sinks for position in first] + places
    tokens = q.size(1)
    keys, values = (torch.cat((x[:, seen], y), 1) for x, y in zip(before, (k, v), strict=True))
    if rope is not None:
        rows = torch.tensor([*places, *range(tokens)]) + len(rope[0]) - length
        keys = rotate(keys, (rope[0][rows], rope[1][rows]))
        q = rotate(q, (rope[0][rows[-tokens:]], rope[1][rows[-tokens:]]))
    keys, values = (x.repeat_interleave(len(q) // len(x), 0) for x in (keys, values))
    scores = q @ keys.mT / math.sqrt(q.size(2))
    if causal:
        future = torch.ones_like(scores, dtype=torch.bool).triu(1 + len(seen))
        scores = scores.masked_fill(future, -math.inf)
    return scores.softmax(-1) @ values
