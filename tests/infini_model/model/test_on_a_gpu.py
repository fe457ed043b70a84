"""The model and its generation on a GPU, compared with float64 on the CPU."""

import pytest
import torch
from tiny_models import draw_memory_parameters, tiny_config

from infini_model.model.generation.causal import generate
from infini_model.model.llama import InfiniLlama

pytestmark = pytest.mark.cuda


def models(gpu, **overrides):
    """A model in float64 on the CPU, and its copy in float32 on the GPU."""
    torch.manual_seed(0)
    exact = InfiniLlama(tiny_config(hidden_size=64, **overrides)).double()
    draw_memory_parameters(exact)
    ours = InfiniLlama(exact.config).to(gpu)
    ours.load_state_dict(exact.state_dict())
    return exact, ours


def tokens(length):
    return torch.randint(11, (2, length), generator=torch.Generator().manual_seed(1))


def loss_and_gradients(model, ids):
    """Of two rows whose last segment is not full; in one of them a document starts."""
    ids = ids.to(model.lm_head.weight.device)
    reset = torch.zeros(2, -(-(ids.size(1) - 1) // 4), dtype=torch.bool, device=ids.device)
    reset[0, 2] = True
    loss = model(ids[:, :-1], labels=ids[:, 1:], reset=reset).loss
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [x.detach().double().cpu() for x in (loss, *gradients) if x is not None]


def assert_close(found, expected):
    """Up to an error that is small beside the largest number of each result."""
    assert len(found) > 10
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("memory", ["linear", "delta", "none"])
def test_the_model_equals_float64_with_all_gradients(gpu, memory, bidirectional):
    exact, ours = models(gpu, memory=memory, bidirectional=bidirectional)
    assert_close(loss_and_gradients(ours, tokens(28)), loss_and_gradients(exact, tokens(28)))


def test_generation_gives_the_tokens_of_the_cpu(gpu):
    exact, _ = models(gpu)
    prompts = [row[:length].tolist() for row, length in zip(tokens(30), (5, 30), strict=True)]
    expected = generate(exact, prompts, max_new_tokens=20, temperature=0.0)
    assert generate(exact.to(gpu), prompts, max_new_tokens=20, temperature=0.0) == expected


@pytest.mark.parametrize(("memory", "recomputed"), [("linear", False), ("delta", True)])
def test_the_whole_model_compiles_without_a_graph_break(gpu, memory, recomputed):
    _, model = models(gpu, memory=memory, num_hidden_layers=1)
    model.model.gradient_checkpointing = recomputed
    plain = loss_and_gradients(model, tokens(12))
    torch.compiler.reset()
    model.compile(backend="inductor" if gpu.type == "cuda" else "aot_eager", fullgraph=True)
    assert_close(loss_and_gradients(model, tokens(12)), plain)
