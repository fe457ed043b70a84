"""Products in 16 bits: their numbers are those of autocast, whatever is cast only once."""

import pytest
import torch
from tiny_models import draw_memory_parameters, tiny_config, tiny_model

from infini_model.config import LoraConfig, SampleConfig
from infini_model.model.generate import read_prompts, stream
from infini_model.model.llama import InfiniLlama
from infini_model.model.lora import initial_adapters
from infini_model.model.precision import PRECISIONS, cast_weights, resolve_precision

WIDTH, TOKENS = 32, 12


def test_the_products_and_their_gradients_are_those_of_a_cast_each(monkeypatch):
    """The result has the same bits; the gradients are rounded when they are summed in 16 bits."""
    results = []
    for once in (True, False):
        if not once:
            monkeypatch.setattr("infini_model.model.layers.product_input", lambda x: x)
        shape = {"hidden_size": WIDTH, "head_dim": 4, "num_hidden_layers": 3}
        model = tiny_model(dtype=torch.float32, **shape)
        ids = torch.randint(11, (2, TOKENS), generator=torch.Generator().manual_seed(0))
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.hidden(ids)
        (hidden * torch.linspace(-1, 1, WIDTH)).sum().backward()
        results.append((hidden, [p.grad for p in model.parameters() if p.grad is not None]))
    (ours, gradients), (theirs, expected) = results
    assert torch.equal(ours, theirs)
    for one, other in zip(gradients, expected, strict=True):
        assert (one - other).abs().max() <= 4e-2 * other.abs().max()


def in_16_bits(lora=None, **changes):
    torch.manual_seed(3)
    model = InfiniLlama(tiny_config(initializer_range=0.4, **changes), lora=lora)
    if lora is not None:
        drawn = {name: torch.randn_like(t) for name, t in initial_adapters(model, {}).items()}
        model.assign(dict(model.named_parameters()) | drawn)
    draw_memory_parameters(model)
    model.precision = PRECISIONS["bf16"]
    return model


def by_autocast(model, prompt, new):
    """Greedy tokens and the logits of each, as autocast casts the weights in each pass."""
    logits, state = read_prompts(model, prompt, torch.tensor([prompt.size(1)]))
    tokens, every = [], [logits]
    with torch.inference_mode(), model.precision.autocast(torch.device("cpu")):
        for _ in range(new):
            token = logits.argmax(-1)
            tokens.append(int(token))
            hidden, state = model.advance(token[:, None], state)
            logits = model.lm_head(hidden[:, -1])
            every.append(logits)
    return tokens, every


@pytest.mark.parametrize(
    "changes",
    [
        {"memory": "none"},
        {"memory": "delta", "tie_word_embeddings": True},
        {"memory": "residual"},
        {"lora": LoraConfig(target_modules=("q_proj", "down_proj"))},
    ],
    ids=["none", "delta, tied", "residual", "lora"],
)
def test_weights_in_16_bits_are_cast_once_and_give_the_bits_of_autocast(changes):
    model, prompt = in_16_bits(**changes), torch.arange(10).view(1, -1)
    tokens, logits = by_autocast(model, prompt, 6)
    cast_weights(model, model.precision)
    again, same = by_autocast(model, prompt, 6)
    assert tokens == again
    assert all(map(torch.equal, logits, same))
    used = set()
    model.lm_head.register_forward_pre_hook(lambda layer, _: used.add(layer.weight.dtype))
    streamed = stream(model, prompt, SampleConfig(max_new_tokens=6, temperature=0.0))
    assert tokens == [token for (token,) in streamed]
    assert used == {torch.bfloat16}


@pytest.mark.parametrize(("capability", "name"), [((7, 5), "fp16"), ((8, 0), "bf16")])
def test_auto_is_the_precision_that_a_gpu_has(capability, name, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert resolve_precision("auto", torch.device("cuda")).name == name
