"""Autocast: which activations are cast, and how often."""

import pytest
import torch
from tiny_models import draw_memory_parameters, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode

from infini_model.config import LoraConfig
from infini_model.model.llama import InfiniLlama
from infini_model.model.lora import initial_adapters

LAYERS, WIDTH, TOKENS = 3, 32, 12


class Casts(TorchDispatchMode):
    """Counts the casts of tensors of `shape`."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        cast = function is torch.ops.aten._to_copy.default and out.dtype != args[0].dtype
        self.count += cast and out.shape == self.shape
        return out


def casts(model, products):
    """How often the width of the residual stream is cast in a forward and in a backward pass.

    In the backward pass also for what was added to the stream: twice a layer.
    """
    ids = torch.randint(11, (2, TOKENS))
    with (
        torch.autocast("cpu", products, enabled=products is not None),
        Casts((2, TOKENS, WIDTH)) as forward,
    ):
        hidden, _ = model.hidden(ids)
    with Casts((2, TOKENS, WIDTH)) as backward:
        hidden.sum().backward()
    return forward.count, backward.count


def build(lora=None):
    # No other activation has the width of the residual stream.
    shape = tiny_config(hidden_size=WIDTH, head_dim=4, num_hidden_layers=LAYERS)
    torch.manual_seed(0)
    model = InfiniLlama(shape, lora=lora)
    if lora is not None:
        model.assign({n: p.detach() for n, p in model.named_parameters()} | initial_adapters(model))
    draw_memory_parameters(model)
    return model


@pytest.mark.parametrize("products", [torch.bfloat16, torch.float16])
def test_a_layer_casts_each_normed_input_once_and_its_gradient_back_once(products):
    assert casts(build(), products) == (2 * LAYERS, 4 * LAYERS)


def test_with_adapters_a_layer_casts_as_often():
    """The frozen embedding is cast as well, and the first layer's input needs no gradient."""
    model = build(LoraConfig(target_modules=("q_proj", "up_proj")))
    assert casts(model, torch.bfloat16) == (2 * LAYERS + 1, 4 * LAYERS - 1)


def test_without_autocast_nothing_is_cast():
    assert casts(build(), None) == (0, 0)


def test_the_products_and_their_gradients_are_those_of_a_cast_each(monkeypatch):
    """The result has the same bits; the gradients are rounded when they are summed in 16 bits."""
    results = []
    for once in (True, False):
        if not once:
            monkeypatch.setattr("infini_model.model.layers.product_input", lambda x: x)
        model = build()
        ids = torch.randint(11, (2, TOKENS), generator=torch.Generator().manual_seed(0))
        with torch.autocast("cpu", torch.bfloat16):
            hidden, _ = model.hidden(ids)
        (hidden * torch.linspace(-1, 1, WIDTH)).sum().backward()
        results.append((hidden, [p.grad for p in model.parameters() if p.grad is not None]))
    (ours, gradients), (theirs, expected) = results
    assert torch.equal(ours, theirs)
    for one, other in zip(gradients, expected, strict=True):
        assert (one - other).abs().max() <= 2e-2 * other.abs().max()


def test_float64_stays_so_under_autocast():
    model, ids = build().double(), torch.randint(11, (2, TOKENS))
    exact, _ = model.hidden(ids)
    with torch.autocast("cpu", torch.bfloat16):
        hidden, _ = model.hidden(ids)
    assert torch.equal(hidden, exact)
