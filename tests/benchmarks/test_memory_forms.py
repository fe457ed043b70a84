"""The controls of `benchmarks.memory_gain` see what they are said to see."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks.memory_forms import FORMS, SINKS, window_attention
from infini_model.config import ModelConfig
from infini_model.model.llama import InfiniLlama

SEGMENT = 16


def by_token(q: Tensor, k: Tensor, v: Tensor, tokens: int | None, reset: Tensor | None) -> Tensor:
    """`window_attention` as it is defined, for one key-value head."""
    out = torch.empty_like(q)
    for row, position in torch.cartesian_prod(
        torch.arange(len(q)), torch.arange(q.size(2))
    ).tolist():
        begins = [] if reset is None else (reset[row].nonzero()[:, 0] * SEGMENT).tolist()
        start = max([0, *(begin for begin in begins if begin <= position)])
        seen = [
            other
            for other in range(start, position + 1)
            if tokens is None or position - other < tokens - SINKS or other < start + SINKS
        ]
        scores = q[row, :, position] @ k[row, 0, seen].mT / math.sqrt(q.size(3))
        out[row, :, position] = scores.softmax(-1) @ v[row, 0, seen]
    return out


@pytest.mark.parametrize("tokens", [None, 20, 37, 68])
@pytest.mark.parametrize("with_documents", [False, True])
def test_a_window_is_the_nearest_tokens_and_the_first_ones(tokens, with_documents):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 6 * SEGMENT, 8, dtype=torch.float64, generator=generator)
        for heads in (3, 1, 1)
    )
    reset = None
    if with_documents:
        reset = torch.tensor([[False, False, True, False, True, False], [True] + [False] * 5])
    expected = by_token(q, k, v, tokens, reset)
    assert torch.allclose(window_attention(q, k, v, tokens, SEGMENT, reset), expected)


@pytest.mark.parametrize("name", FORMS)
def test_no_form_sees_a_later_token_or_another_document(name):
    form = FORMS[name]
    config = ModelConfig(vocab_size=50, segment_length=SEGMENT, initializer_range=0.2, **form.model)
    torch.manual_seed(0)
    with form.applied(), torch.no_grad():
        model = InfiniLlama(config)
        for attention in model.attentions:
            if config.memory == "residual":
                attention.memory_weight.fill_(0.5)
        ids = torch.randint(50, (1, 6 * SEGMENT))
        reset = torch.tensor([[True, False, False, True, False, False]])

        def logits(changed: int) -> Tensor:
            other = ids.clone()
            other[0, changed] = (ids[0, changed] + 1) % 50
            return model(other, reset=reset).logits[0] - model(ids, reset=reset).logits[0]

        later = logits(4 * SEGMENT)
        assert torch.equal(later[: 4 * SEGMENT], torch.zeros_like(later[: 4 * SEGMENT]))
        # The first token of a document is seen to its end, but where there is no memory.
        assert (later[5 * SEGMENT :].abs().max() > 1e-4) == (name != "none")
        first = logits(0)
        assert torch.equal(first[3 * SEGMENT :], torch.zeros_like(first[3 * SEGMENT :]))
