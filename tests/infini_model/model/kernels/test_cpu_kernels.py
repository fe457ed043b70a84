"""The CPU kernels against plain PyTorch, with tiles and chunks that do not divide the sizes evenly.

Those of the memory are compared with the definition in `test_attention.py`.
"""

import os

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from infini_model.model.kernels import tiled_attention, tiling
from infini_model.model.kernels.memory_ops import gated_read, key_value_sums
from infini_model.model.kernels.scan import exclusive_scan
from infini_model.model.key_shift import shifted_keys
from infini_model.model.rotary import rotate

LAYOUTS = pytest.mark.parametrize("transposed", [False, True])


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
        x = torch.randn(segments, length, heads, 6, generator=generator, dtype=dtype)
        x = x.transpose(1, 2)
        return (x if transposed else x.contiguous()).requires_grad_()

    return normal(heads), normal(kv_heads), normal(kv_heads), normal(heads).detach()


def assert_equal(ours, theirs, inputs, grad):
    """Results, and the gradients of `inputs`."""
    both = ([out, *torch.autograd.grad(out, inputs, grad)] for out in (ours, theirs))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@LAYOUTS
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (3, 1)])
@pytest.mark.parametrize("length", [1, 4, 5, 24])
def test_attention_is_that_of_pytorch(length, heads, kv_heads, transposed):
    q, k, v, grad = draw(5, heads, kv_heads, length, transposed=transposed)
    # The halves of the tables differ, so the inverse rotation must swap them.
    rope = torch.randn(2, length, 6, dtype=torch.float64).unbind()
    for tables, queries, keys in (((), q, k), (rope, rotate(q, rope), rotate(k, rope))):
        ours = tiled_attention.tiled_attention(q, k, v, *tables)
        theirs = scaled_dot_product_attention(queries, keys, v, is_causal=True, enable_gqa=True)
        assert_equal(ours, theirs, (q, k, v), grad)


@LAYOUTS
@pytest.mark.parametrize("length", [1, 2, 24])
def test_shifted_keys_are_a_lerp(length, transposed):
    _, k, _, _ = draw(2, 4, 3, length, transposed=transposed)
    share = torch.rand(2, 3, length, dtype=torch.float64)
    share[:, :, 0] = 0.0
    share.requires_grad_()
    before = torch.cat((k[:, :, :1], k[:, :, :-1]), dim=2)
    lerp = torch.lerp(k, before, share.unsqueeze(-1))
    assert_equal(shifted_keys(k, share), lerp, (k, share), torch.randn_like(k))


def everything(q, k, v, grad):
    """The three operators in a chain, and all gradients."""
    gate = torch.linspace(-1, 1, q.size(1), dtype=q.dtype, requires_grad=True)
    kv, norm = key_value_sums(k, v)
    out = gated_read(q, tiled_attention.tiled_attention(q, k, v), gate, kv, norm)
    return [out, kv, norm, *torch.autograd.grad(out, (q, k, v, gate), grad)]


def test_equal_at_any_number_of_threads_and_to_the_bit_at_the_same(threads):
    inputs = draw(10, 4, 2, 24, transposed=True, dtype=torch.float32)
    threads(1)
    alone = everything(*inputs)
    for count in (2, 3):
        threads(count)
        first, second = (everything(*inputs) for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
        torch.testing.assert_close(first, alone)
        assert torch.get_num_threads() == count


def test_a_forked_process_starts_its_own_threads():
    inputs = draw(10, 4, 2, 24, transposed=False, dtype=torch.float32)
    tiled_attention.tiled_attention(*inputs[:3])
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # PyTorch's own threads do not survive a fork
        os._exit(0 if torch.equal(*(everything(*inputs)[0] for _ in range(2))) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_the_operators_pass_opcheck(threads):
    """But for tracing, which the tests of compiled layers do."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    threads(1)
    q, k, v, _ = draw(2, 4, 2, 5, transposed=True)
    gate = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    kv, norm = (x.detach().requires_grad_() for x in key_value_sums(k, v))
    share = torch.linspace(0, 1, 5, dtype=torch.float64).expand(2, 2, 5)
    rope = torch.rand(2, 5, 6, dtype=torch.float64).unbind()
    added = torch.rand(2, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    first = torch.rand(2, 2, 2, dtype=torch.float64, requires_grad=True)
    reset = torch.tensor([[False, True, False, False], [False, False, False, True]])
    kept = torch.rand(2, 3, 2, dtype=torch.float64, requires_grad=True)
    for operator, arguments in (
        (tiled_attention.tiled_attention, (q, k, v)),
        (tiled_attention.tiled_attention, (q, k, v, *rope)),
        (shifted_keys, (k, share)),
        (key_value_sums, (k, v)),
        (gated_read, (q, q.detach() + 1, gate, kv, norm)),
        (exclusive_scan, (added, first, reset)),
        (exclusive_scan, (added, first, reset, kept)),
    ):
        torch.library.opcheck(operator, arguments, test_utils=checks)


@pytest.mark.parametrize("from_last", [False, True])
def test_the_gradients_of_a_scan_that_decays(from_last):
    added, first = torch.randn(2, 4, 2, 3).double(), torch.randn(2, 2, 3).double()
    reset, kept = torch.rand(2, 5) < 0.3, torch.rand(2, 4, 2).double()
    inputs = [x.requires_grad_() for x in (added, first, kept)]

    def scan(added, first, kept):
        return exclusive_scan(added, first, reset, kept, from_last=from_last)

    assert torch.autograd.gradcheck(scan, inputs)
    # Nothing gets past a reset, in this direction or in the other.
    reset[:], reset[:, 2] = False, True
    added.detach()[:, slice(2, None) if from_last else slice(2)] = torch.nan
    states, end = scan(*inputs)
    after = states[:, :2] if from_last else states[:, 2:]
    gradients = torch.autograd.grad(after.sum() + end.sum(), [first, kept])
    assert all(x.isfinite().all() for x in (after, end, *gradients))
