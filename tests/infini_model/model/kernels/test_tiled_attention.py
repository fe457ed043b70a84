"""The CPU kernels against PyTorch's, with tiles and chunks that do not divide the sizes evenly."""

import os

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from infini_model.model.kernels import tiled_attention, tiling
from infini_model.model.kernels.memory_ops import gated_read, key_value_sums
from infini_model.model.key_shift import shifted_keys
from infini_model.model.rotary import rotate


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(tiled_attention, "TILE", 4)
    monkeypatch.setattr(tiling, "CHUNK_BYTES", 2000)


@pytest.fixture(autouse=True)
def threads():
    """Two threads share the chunks, unless a test sets another number."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield torch.set_num_threads
    torch.set_num_threads(before)


def draw(segments, heads, kv_heads, length, *, transposed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(length)

    def normal(heads):
        if transposed:
            x = torch.randn(segments, length, heads, 6, generator=generator, dtype=dtype)
            return x.transpose(1, 2).requires_grad_()
        x = torch.randn(segments, heads, length, 6, generator=generator, dtype=dtype)
        return x.requires_grad_()

    return normal(heads), normal(kv_heads), normal(kv_heads), normal(heads).detach()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 17, 24])
def test_equals_pytorchs_attention(length, heads, kv_heads, transposed):
    q, k, v, grad = draw(5, heads, kv_heads, length, transposed=transposed)
    ours = tiled_attention.tiled_attention(q, k, v)
    theirs = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    both = ([out, *torch.autograd.grad(out, (q, k, v), grad)] for out in (ours, theirs))
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("length", [1, 5, 17])
def test_rotates_queries_and_keys(length, transposed):
    q, k, v, grad = draw(5, 4, 2, length, transposed=transposed)
    # The halves of the tables differ, so the inverse rotation must swap them.
    rope = torch.randn(2, length, 6, dtype=torch.float64).unbind()
    ours = tiled_attention.tiled_attention(q, k, v, *rope)
    theirs = tiled_attention.tiled_attention(rotate(q, rope), rotate(k, rope), v)
    both = ([out, *torch.autograd.grad(out, (q, k, v), grad)] for out in (ours, theirs))
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("length", [1, 2, 24])
def test_shifts_keys(length, transposed):
    _, k, _, _ = draw(2, 4, 3, length, transposed=transposed)
    grad, share = torch.randn_like(k), torch.rand(2, 3, length, dtype=torch.float64)
    share[:, :, 0] = 0.0
    share.requires_grad_()
    before = torch.cat((k[:, :, :1], k[:, :, :-1]), dim=2)
    both = (
        [out, *torch.autograd.grad(out, (k, share), grad)]
        for out in (shifted_keys(k, share), torch.lerp(k, before, share.unsqueeze(-1)))
    )
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def everything(q, k, v, grad):
    """The three operators in a chain, and all gradients."""
    gate = torch.linspace(-1, 1, q.size(1), dtype=q.dtype, requires_grad=True)
    kv, norm = key_value_sums(k, v)
    out = gated_read(q, tiled_attention.tiled_attention(q, k, v), gate, kv, norm)
    return [out, kv, norm, *torch.autograd.grad(out, (q, k, v, gate), grad)]


def test_equal_at_any_number_of_threads_and_to_the_bit_at_the_same(threads):
    inputs = draw(40, 4, 2, 24, transposed=True, dtype=torch.float32)
    threads(1)
    alone = everything(*inputs)
    for count in (2, 3):
        threads(count)
        first, second = (everything(*inputs) for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
        torch.testing.assert_close(first, alone)
        assert torch.get_num_threads() == count


def test_a_forked_process_starts_its_own_threads(threads):
    inputs = draw(40, 4, 2, 24, transposed=False, dtype=torch.float32)
    threads(2)
    tiled_attention.tiled_attention(*inputs[:3])
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # PyTorch's own threads do not survive a fork
        os._exit(0 if torch.equal(*(everything(*inputs)[0] for _ in range(2))) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_autocast_leaves_float32_exact():
    inputs = draw(5, 4, 2, 24, transposed=False, dtype=torch.float32)
    plain = everything(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        under = everything(*inputs)
    for ours, theirs in zip(under, plain, strict=True):
        assert torch.equal(ours, theirs)


def test_the_operators_pass_opcheck_and_gradcheck(monkeypatch, threads):
    # gradcheck runs several passes per element: few elements, in two tiles and four chunks. One
    # thread is enough, since a test above compares several threads with one.
    monkeypatch.setattr(tiling, "CHUNK_BYTES", 200)
    threads(1)
    q, k, v, _ = draw(2, 4, 2, 5, transposed=True)
    gate = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    kv, norm = (x.detach().requires_grad_() for x in key_value_sums(k, v))
    share = torch.linspace(0, 1, 5, dtype=torch.float64).expand(2, 2, 5)
    for operator, arguments in (
        (tiled_attention.tiled_attention, (q, k, v)),
        (tiled_attention.tiled_attention, (q, k, v, *torch.rand(2, 5, 6, dtype=torch.float64))),
        (shifted_keys, (k, share)),
        (key_value_sums, (k, v)),
        (gated_read, (q, q.detach() + 1, gate, kv, norm)),
    ):
        torch.library.opcheck(operator, arguments)
        assert torch.autograd.gradcheck(operator, arguments)
