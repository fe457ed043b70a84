"""Attention, model and generation on a GPU, compared with float64 on the CPU."""

import pytest
import torch
from tiny_models import draw_memory_parameters, tiny_config

from infini_model.model.attention import infini_attention
from infini_model.model.definition import attention_by_segment
from infini_model.model.generation.causal import generate
from infini_model.model.llama import InfiniLlama
from infini_model.model.rotary import rope_tables

pytestmark = pytest.mark.cuda
# Largest error allowed, relative to the largest number of a result.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
SEGMENT, TOKENS, WIDTH = 64, 3 * 64 + 17, 64
NAMES = ("out", "kv", "norm", "dq", "dk", "dv", "dgate", "dkeys")


def draw(dtype, kv_heads=2):
    """q, k, v, gate and memory keys of two rows, as float64 numbers that `dtype` can hold."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, TOKENS, WIDTH) for heads in (4, kv_heads, kv_heads)]
    q, k, v, gate, keys = (
        torch.randn(shape, generator=generator).to(dtype).double()
        for shape in (*shapes, (4,), shapes[1])
    )
    return q, k, v, gate, keys


def results(attention, tensors, update, causal, like):
    """Outputs and gradients of `attention` on the device and in the dtype of `like`."""
    q, k, v, gate, keys = (x.to(like).requires_grad_() for x in tensors)
    reset = torch.zeros(2, 4, dtype=torch.bool, device=like.device)
    reset[1, 2] = True
    out, memory = attention(
        *(q, k, v, gate),
        segment_length=SEGMENT,
        rope=tuple(table.to(like) for table in rope_tables(SEGMENT, WIDTH, 100.0)),
        update=update,
        reset=reset,
        memory_keys=keys,
        causal=causal,
    )
    weights = torch.linspace(-1, 1, out.numel()).view_as(out).to(like)
    gradients = torch.autograd.grad(out, (q, k, v, gate, keys), weights)
    return [x.detach().double().cpu() for x in (out, *memory, *gradients)]


def assert_close(found, expected, tolerance, names):
    for name, one, other in zip(names, found, expected, strict=True):
        error = (one - other).abs().max()
        assert error <= tolerance * other.abs().max(), f"{name}: {error} of {other.abs().max()}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("update", ["linear", "delta"])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_equals_the_paper_with_all_gradients(gpu, dtype, update, causal):
    tensors = draw(dtype)
    exact = torch.zeros((), dtype=torch.float64)
    expected = results(attention_by_segment, tensors, update, causal, exact)
    like = torch.zeros((), dtype=dtype, device=gpu)
    found = results(infini_attention, tensors, update, causal, like)
    assert_close(found, expected, TOLERANCE[dtype], NAMES)


def test_attention_takes_any_strides(gpu):
    q, k, v, gate, keys = (x.to(gpu, torch.float32) for x in draw(torch.float32))

    def apart(x):
        """The same numbers, stored as [B, T, H, D] with gaps."""
        wide = x.new_zeros(x.size(0), x.size(2), x.size(1), x.size(3) + 8)
        wide[..., : x.size(3)] = x.transpose(1, 2)
        return wide[..., : x.size(3)].transpose(1, 2)

    options = {"segment_length": SEGMENT, "memory_keys": keys}
    dense, _ = infini_attention(q, k, v, gate, **options)
    options["memory_keys"] = apart(keys)
    gaps, _ = infini_attention(apart(q), apart(k), apart(v), gate, **options)
    torch.testing.assert_close(gaps, dense, rtol=1e-5, atol=1e-5)


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
    ids = ids.to(model.lm_head.weight.device)
    reset = torch.zeros(2, -(-(ids.size(1) - 1) // 4), dtype=torch.bool, device=ids.device)
    reset[0, 3] = True
    loss = model(ids[:, :-1], labels=ids[:, 1:], reset=reset).loss
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [x.detach().double().cpu() for x in (loss, *gradients) if x is not None]


@pytest.mark.parametrize("memory", ["linear", "delta", "none"])
def test_the_model_equals_float64_with_all_gradients(gpu, memory):
    exact, ours = models(gpu, memory=memory)
    expected = loss_and_gradients(exact, tokens(25))
    found = loss_and_gradients(ours, tokens(25))
    assert len(found) > 10
    assert_close(found, expected, 1e-4, range(len(expected)))


@pytest.mark.parametrize("memory", ["linear", "delta"])
def test_a_text_read_in_parts_equals_float64(gpu, memory):
    exact, ours = models(gpu, memory=memory)
    ids, state, logits = tokens(27).to(gpu), None, []
    with torch.no_grad():
        for part in ids.split([9, 1, 1, 16], dim=1):
            out = ours(part, state=state)
            state = out.state
            logits.append(out.logits)
        expected = exact(tokens(27)).logits
    assert_close([torch.cat(logits, 1).double().cpu()], [expected], 1e-4, ["logits"])


def test_generation_gives_the_tokens_of_the_cpu(gpu):
    exact, _ = models(gpu)
    prompts = [row[:length].tolist() for row, length in zip(tokens(30), (5, 30), strict=True)]
    expected = generate(exact, prompts, max_new_tokens=20, temperature=0.0)
    assert generate(exact.to(gpu), prompts, max_new_tokens=20, temperature=0.0) == expected


@pytest.mark.parametrize("memory", ["linear", "delta"])
def test_compiled_it_gives_the_same_numbers(gpu, memory):
    _, model = models(gpu, memory=memory, num_hidden_layers=1)
    plain = loss_and_gradients(model, tokens(25))
    torch.compiler.reset()
    model.compile(backend="inductor" if gpu.type == "cuda" else "aot_eager", fullgraph=True)
    assert_close(loss_and_gradients(model, tokens(25)), plain, 1e-4, range(len(plain)))
