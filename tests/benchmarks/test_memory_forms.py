"""The controls of `benchmarks.memory_gain` see what they are said to see."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks.gated_delta import gated_delta
from benchmarks.memory_forms import FORMS, window_attention
from infini_model.config import ModelConfig
from infini_model.model.llama import InfiniLlama

SEGMENT = 16


def by_token(
    q: Tensor, k: Tensor, v: Tensor, tokens: int | None, starts: Tensor | None, sinks: int
) -> Tensor:
    """`window_attention` as it is defined, for one key-value head."""
    out = torch.empty_like(q)
    for row, position in torch.cartesian_prod(
        torch.arange(len(q)), torch.arange(q.size(2))
    ).tolist():
        begins = [] if starts is None else (starts[row].nonzero()[:, 0] * SEGMENT).tolist()
        start = max([0, *(begin for begin in begins if begin <= position)])
        seen = [
            other
            for other in range(start, position + 1)
            if tokens is None or position - other < tokens - sinks or other < start + sinks
        ]
        scores = q[row, :, position] @ k[row, 0, seen].mT / math.sqrt(q.size(3))
        out[row, :, position] = scores.softmax(-1) @ v[row, 0, seen]
    return out


@pytest.mark.parametrize(("tokens", "sinks"), [(None, 4), (20, 4), (37, 4), (68, 4), (37, 0)])
@pytest.mark.parametrize("with_documents", [False, True])
def test_a_window_is_the_nearest_tokens_and_the_first_ones(tokens, sinks, with_documents):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 6 * SEGMENT, 8, dtype=torch.float64, generator=generator)
        for heads in (3, 1, 1)
    )
    starts = None
    if with_documents:
        starts = torch.tensor([[False, False, True, False, True, False], [True] + [False] * 5])
    expected = by_token(q, k, v, tokens, starts, sinks)
    found = window_attention(q, k, v, tokens, SEGMENT, starts, sinks=sinks)
    assert torch.allclose(found, expected)


@pytest.mark.parametrize("name", FORMS)
def test_no_form_sees_a_later_token_or_another_document(name):
    form = FORMS[name]
    config = ModelConfig(vocab_size=50, segment_length=SEGMENT, initializer_range=0.2, **form.model)
    torch.manual_seed(0)
    with form.applied(), torch.no_grad():
        model = InfiniLlama(config)
        for attention in model.attentions:
            if hasattr(attention.memory, "memory_weight"):
                attention.memory.memory_weight.fill_(0.5)
        ids = torch.randint(50, (1, 6 * SEGMENT))
        starts = torch.tensor([[True, False, False, True, False, False]])

        def logits(changed: int) -> Tensor:
            other = ids.clone()
            other[0, changed] = (ids[0, changed] + 1) % 50
            both = model(torch.cat((other, ids)), document_starts=starts.expand(2, -1)).logits
            return both[0] - both[1]

        later = logits(4 * SEGMENT)
        assert torch.equal(later[: 4 * SEGMENT], torch.zeros_like(later[: 4 * SEGMENT]))
        # The first token of a document is seen beyond the next segment, if there is a memory.
        assert (later[5 * SEGMENT :].abs().max() > 1e-4) == (name != "none")
        for before in (0, 3 * SEGMENT - 1):
            other = logits(before)[3 * SEGMENT :]
            assert torch.equal(other, torch.zeros_like(other))


def delta_by_token(q, k, v, decay, beta, starts):
    """`gated_delta` as the paper states it."""
    outs, length = [], q.size(3)
    state = q.new_zeros(*q.shape[:1], q.size(2), q.size(4), q.size(4))
    q, k, v = (x.transpose(1, 2).flatten(2, 3) for x in (q, k, v))
    decay, beta = (x.transpose(1, 2).flatten(2, 3)[..., None, None] for x in (decay, beta))
    for at in range(q.size(2)):
        if at % length == 0:
            state = state * ~starts[:, at // length, None, None, None]
        key, identity = k[:, :, at, :, None], torch.eye(k.size(3), dtype=k.dtype)
        erased = identity - beta[:, :, at] * key @ key.mT
        state = decay[:, :, at].exp() * erased @ state
        state = state + beta[:, :, at] * key @ v[:, :, at, None]
        outs.append((q[:, :, at, None] @ state).squeeze(2))
    return torch.stack(outs, 2).unflatten(2, (-1, length)).transpose(1, 2)


def test_the_gated_delta_rule_by_segment_is_the_recurrence_with_its_gradients():
    generator = torch.Generator().manual_seed(0)
    shape, place = (2, 5, 3, 8, 6), {"dtype": torch.float64, "generator": generator}
    q, k, v, weight = (torch.randn(shape, **place) for _ in range(4))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    decay, beta = -torch.rand(shape[:-1], **place), torch.rand(shape[:-1], **place)
    starts = torch.tensor([[True, False, True, False, False], [False, False, False, False, True]])
    inputs = [x.requires_grad_() for x in (q, k, v, decay, beta)]
    outs = [form(*inputs, starts) for form in (gated_delta, delta_by_token)]
    gradients = [torch.autograd.grad((out * weight).sum(), inputs) for out in outs]
    for found, expected in zip((outs[0], *gradients[0]), (outs[1], *gradients[1]), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
