"""Inspection of the memory, beside the definition of the attention, in float64.

Its shares in the output, and what heads that do not read it change.
"""

import pytest
import torch
from tiny_models import draw_memory_parameters, tiny_config

from infini_model.model.definition import attention_by_segment
from infini_model.model.inspection.knock_out import knocked_out
from infini_model.model.inspection.memory_use import watched
from infini_model.model.key_shift import with_previous
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import ConfigError

LENGTH, SEGMENTS = 4, 5
CASES = [
    {"memory": "delta", "memory_query_shift": True},
    {"memory": "linear", "memory_key_shift": False, "num_key_value_heads": 4},
    {"memory": "residual"},
]


def build(dtype=torch.float64, **changes):
    torch.manual_seed(0)
    model = InfiniLlama(tiny_config(initializer_range=0.3, **changes)).to(dtype)
    draw_memory_parameters(model)
    return model


def ids(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, (3, SEGMENTS * LENGTH), generator=generator)


def first_layer(model, tokens, reset):
    """(local part, memory part), each [B, H, T, D], and the memory, by the definition."""
    attention, config = model.model.layers[0].self_attn, model.config
    x = model.model.layers[0].input_layernorm(model.model.embed_tokens(tokens))
    q, k, v = attention.project(x)
    starts = reset.repeat_interleave(LENGTH, 1) & (torch.arange(tokens.size(1)) % LENGTH == 0)
    keys = (
        with_previous(k, attention.memory_key_shift, None, starts) if config.memory_key_shift else k
    )
    queries = q
    if config.memory_query_shift:
        queries = with_previous(q, attention.memory_query_shift, None, starts)

    def at(weight):
        return attention_by_segment(
            q,
            k,
            v,
            weight,
            segment_length=LENGTH,
            rope=(model.model.cos.double(), model.model.sin.double()),
            update=config.memory,
            reset=reset,
            memory_keys=keys,
            memory_queries=queries,
            memory_gates=attention.memory_gates(x),
        )

    if config.memory == "residual":
        weight = attention.memory_weight
        (local, memory), (both, _) = at(weight * 0), at(weight)
        return local, both - local, memory
    gate = torch.ones(4).double() * 1e4
    (local, memory), (read, _) = at(-gate), at(gate)
    share = attention.gate.sigmoid().view(-1, 1, 1)
    return (1 - share) * local, share * read, memory


@pytest.mark.parametrize("changes", CASES)
def test_shares_and_norms_are_those_of_the_definition(changes):
    model, tokens = build(**changes), ids()
    reset = torch.rand(3, SEGMENTS, generator=torch.Generator().manual_seed(2)) < 0.4
    targets = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(3)) < 0.7
    with torch.no_grad(), watched(model, targets) as watch:
        model.hidden(tokens, reset=reset)
    local, read, memory = first_layer(model, tokens, reset)
    sizes = [x.norm(dim=3) for x in (local, read)]
    shares, positions = torch.zeros(4).double(), 0
    for row in range(3):
        for position in range(tokens.size(1)):
            segment = position // LENGTH
            if segment and not reset[row, segment] and targets[row, position]:
                ours, theirs = (size[row, :, position] for size in sizes)
                shares += theirs / (ours + theirs)
                positions += 1
    use = watch.use
    assert positions == use.positions > 5
    torch.testing.assert_close(use.mean_shares[0], (shares / positions).detach())
    norms = [x.flatten(2).norm(dim=2).mean().item() for x in memory.parts]
    expected = torch.tensor([*norms, torch.nan][:2]).double()
    torch.testing.assert_close(use.mean_norms[0], expected, equal_nan=True)
    assert use.shares.shape == (2, 4)


def test_of_two_streams_the_noisy_one_counts():
    model = build(bidirectional=True, memory_query_shift=True)
    clean, noisy = ids(), ids(seed=5)
    everywhere = torch.ones_like(clean, dtype=torch.bool)

    def shares(one, other):
        with torch.no_grad(), watched(model, everywhere) as watch:
            model.two_stream_forward(one, other)
        return watch.use.mean_shares

    with torch.no_grad(), watched(model, everywhere) as watch:
        model.hidden(clean)
    torch.testing.assert_close(shares(clean, clean), watch.use.mean_shares)
    assert (shares(noisy, clean) - shares(clean, clean)).abs().min() > 1e-6


@pytest.mark.parametrize(
    ("memory", "dtype"),
    [
        ("linear", torch.float64),
        ("delta", torch.bfloat16),
        ("residual", torch.float64),
        ("residual", torch.bfloat16),
    ],
)
def test_all_heads_knocked_out_is_a_memory_that_is_emptied_before_every_segment(memory, dtype):
    model, tokens = build(dtype, memory=memory), ids()
    with torch.no_grad():
        emptied = model(tokens, reset=torch.ones(3, SEGMENTS, dtype=torch.bool)).logits
        read = model(tokens).logits
        with knocked_out(model):
            assert torch.equal(model(tokens).logits, emptied)
        assert torch.equal(model(tokens).logits, read)
    assert not torch.equal(read, emptied)


@pytest.mark.parametrize("memory", ["linear", "residual"])
@pytest.mark.parametrize(
    ("head", "changed"), [(2, [False, False, True, False]), (None, [True] * 4)]
)
def test_what_other_heads_and_layers_return_stays(head, changed, memory):
    model, tokens, seen = build(memory=memory), ids(), []
    first, second = model.attentions
    before = second.read_weight.detach().clone()
    first.o_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(tokens)
    with knocked_out(model, layer=0, head=head):
        assert torch.equal(second.read_weight, before)
        model(tokens)
    moved = (seen[0] != seen[1]).unflatten(2, (4, 4)).any(3)
    assert moved[:, 4:].all(1).all(0).tolist() == changed
    assert not moved[:, :4].any()


def test_a_model_without_memory_is_refused():
    model = build(memory="none")
    for inspect in (knocked_out(model), watched(model, torch.ones(1, 4, dtype=torch.bool))):
        with pytest.raises(ConfigError, match=r"^model\.memory: none"), inspect:
            pass
