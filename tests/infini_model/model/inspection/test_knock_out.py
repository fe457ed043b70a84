"""Knocked-out heads, beside an emptied memory and the definition, in float64."""

import pytest
import torch
from tiny_models import draw_memory_parameters, tiny_config

from infini_model.model.inspection.knock_out import knocked_out
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import ConfigError

MEMORIES = pytest.mark.parametrize("memory", ["linear", "delta"])


def build(dtype=torch.float64, **changes):
    torch.manual_seed(0)
    model = InfiniLlama(tiny_config(initializer_range=0.3, **changes)).to(dtype)
    draw_memory_parameters(model)
    return model


def ids(batch=2, tokens=22):
    return torch.randint(11, (batch, tokens), generator=torch.Generator().manual_seed(1))


def gates(model):
    return [layer.self_attn.gate.detach().clone() for layer in model.model.layers]


@MEMORIES
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_all_heads_knocked_out_is_a_memory_that_is_emptied_before_every_segment(memory, dtype):
    model, tokens = build(dtype, memory=memory), ids()
    with torch.no_grad():
        emptied = model(tokens, reset=torch.ones(2, 6, dtype=torch.bool)).logits
        read = model(tokens).logits
        with knocked_out(model):
            assert torch.equal(model(tokens).logits, emptied)
        assert torch.equal(model(tokens).logits, read)
    assert not torch.equal(read, emptied)


def test_all_heads_knocked_out_is_the_model_without_memory():
    model, tokens = build(), ids()
    bare = InfiniLlama(model.config.model_copy(update={"memory": "none"})).double()
    weights = model.state_dict()
    bare.load_state_dict({name: weights[name] for name in bare.state_dict()})
    with knocked_out(model):
        close = model(tokens).logits
    torch.testing.assert_close(close, bare(tokens).logits, rtol=0, atol=1e-12)


def test_a_layer_is_all_of_its_heads_and_no_other():
    model, tokens = build(), ids()
    before = gates(model)
    with knocked_out(model, layer=1):
        layer = model(tokens).logits
        assert torch.equal(gates(model)[0], before[0])
    with torch.no_grad():
        model.model.layers[1].self_attn.gate.fill_(-1e5)
        assert torch.equal(model(tokens).logits, layer)


def test_one_head_leaves_what_the_other_heads_return():
    model, tokens = build(), ids()
    seen = []
    projection = model.model.layers[0].self_attn.o_proj
    projection.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(tokens)
    with knocked_out(model, layer=0, head=2):
        model(tokens)
    moved = (seen[0] != seen[1]).unflatten(2, (4, 4)).any(3)
    assert moved[:, 4:].all(1).all(0).tolist() == [False, False, True, False]
    assert not moved[:, :4].any()


def test_gates_come_back_bit_for_bit_also_after_an_error():
    model = build(torch.float32)
    before = gates(model)
    for layer, head in ((None, None), (1, None), (0, 3), (None, 2)):
        with pytest.raises(ZeroDivisionError), knocked_out(model, layer, head):
            assert 1 / int(all(map(torch.equal, gates(model), before)))
        assert all(map(torch.equal, gates(model), before))
    with pytest.raises(IndexError), knocked_out(model, 0, 4):
        pass
    assert all(map(torch.equal, gates(model), before))


def test_a_model_without_memory_is_refused_in_one_line():
    with (
        pytest.raises(ConfigError, match=r"^model\.memory: none"),
        knocked_out(build(memory="none")),
    ):
        pass
