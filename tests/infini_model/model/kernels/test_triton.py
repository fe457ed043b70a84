"""The Triton kernels against the formulas in PyTorch, with autograd's gradients.

On CUDA the compiled kernels run. Elsewhere Triton's interpreter runs them in a separate process:
Triton reads TRITON_INTERPRET when it is imported, and another test may have imported it already.
"""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional

triton = pytest.importorskip(
    "triton", reason="triton is not installed: CPU builds of torch bring none"
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from infini_model.model.kernels import memory_ops  # noqa: E402, F401 - defines the operators
from infini_model.model.kernels.triton import read, write  # noqa: E402
from infini_model.model.kernels.triton.launch import (  # noqa: E402
    gated_read_backward,
    gated_read_forward,
    kernel_constants,
    key_value_sums_backward,
    key_value_sums_forward,
)

runs_kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="test_interpreted runs them"
)
# Largest error allowed against float64, relative to the largest number in the result.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.mark.skipif(torch.cuda.is_available() or INTERPRETED, reason="the kernels run themselves")
def test_interpreted():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    process = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    "kernel",
    [read.read_forward, read.read_backward, write.sums_forward, write.sums_backward],
    ids=lambda kernel: kernel.__name__,
)
@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 128), (torch.float32, 256)], ids=str)
def test_compiles_for_hopper_without_a_gpu(kernel, dtype, dim):
    row = ("*bf16" if dtype == torch.bfloat16 else "*fp32", "i32", "i32", "i32")
    rows = ("grad", "q", "local", "out", "dq", "dlocal", "keys", "values", "dkeys", "dvalues")
    tensors = dict.fromkeys(rows, row)
    numbers = dict.fromkeys(("gate", "kv", "norm", "dgate", "dkv", "dnorm"), "*fp32")
    counts = dict.fromkeys(("kv_heads", "group", "length", "blocks_per_program"), "i32")
    constants = kernel_constants(torch.empty(1, 1, 1, dim, dtype=dtype))
    del constants["enable_fp_fusion"]
    types = {**tensors, **numbers, **counts, **dict.fromkeys(constants, "constexpr")}
    signature = {argument: types[argument] for argument in kernel.arg_names}
    compiled = triton.compile(
        ASTSource(kernel, signature, constants),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 8, "enable_fp_fusion": True},
    )
    assert compiled.metadata.shared <= 227 * 1024


@pytest.fixture(autouse=True)
def _bfloat16_products(monkeypatch):
    """Triton's interpreter (3.9) multiplies the raw bits of bfloat16; convert to float32 first."""
    if not INTERPRETED:
        return
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder

    multiply = InterpreterBuilder.create_dot

    def create_dot(self, a, b, *others):
        a, b = (self.create_fp_ext(x, float32) if x.dtype == bfloat16 else x for x in (a, b))
        return multiply(self, a, b, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def formula(q, local, gate, kv, norm):
    """Equations 7 and 10, one query head at a time."""
    heads = []
    for h in range(q.size(1)):
        g = h // (q.size(1) // norm.size(1))
        sigma = functional.relu(q[:, h]) + q[:, h].clamp(max=0).exp()
        total = (sigma * norm[:, g, None]).sum(-1, keepdim=True)
        hit = total > 1e-18
        read = sigma @ kv[:, g] / torch.where(hit, total, 1.0)
        mixed = torch.lerp(local[:, h], read, gate[h].sigmoid())
        heads.append(torch.where(hit, mixed, local[:, h]))
    return torch.stack(heads, dim=1)


def draw(n, heads, kv_heads, length, dim, dtype=torch.float32, keys=40, seed=0):
    """Arguments and a gradient; q, local and grad are stored as [N, L, H, D]."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    q, local, grad = (normal(n, length, heads, dim).transpose(1, 2).to(dtype) for _ in range(3))
    written = functional.elu(normal(n, kv_heads, keys, dim)) + 1
    kv, norm = written.mT @ normal(n, kv_heads, keys, dim), written.sum(2)
    return tuple(x.to(DEVICE) for x in (q, local, normal(heads), kv, norm)), grad.to(DEVICE)


def kernels(arguments, grad, **options):
    out = gated_read_forward(*arguments, **options)
    return out, *gated_read_backward(grad, *arguments, **options)


def exact(arguments, grad):
    leaves = [x.double().requires_grad_() for x in arguments]
    out = formula(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad.double())


READ = ("out", "dq", "dlocal", "dgate", "dkv", "dnorm")
SUMS = ("kv", "norm", "dkeys", "dvalues")


def assert_close(results, expected, tolerance, names=READ):
    for name, result, should in zip(names, results, expected, strict=True):
        assert result.shape == should.shape, name
        error = (result.double() - should).abs().max()
        assert error <= tolerance * should.abs().max(), f"{name}: {error} of {should.abs().max()}"


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("n", "heads", "kv_heads", "length", "dim"),
    [
        (2, 4, 2, 35, 16),
        (1, 2, 2, 1, 64),
        (1, 3, 1, 20, 24),
        (1, 2, 1, 33, 128),
        (1, 2, 1, 20, 190),
    ],
)
def test_equals_the_formula_with_all_gradients(n, heads, kv_heads, length, dim, dtype):
    arguments, grad = draw(n, heads, kv_heads, length, dim, dtype)
    results = kernels(arguments, grad)
    assert [x.dtype for x in results] == [dtype] * 3 + [torch.float32] * 3
    assert_close(results, exact(arguments, grad), TOLERANCE[dtype])


@runs_kernels
@pytest.mark.parametrize("multiprocessors", [1, 3, 132])
def test_any_number_of_programs_and_twice_the_same_bits(multiprocessors):
    arguments, grad = draw(1, 3, 1, 70, 16)
    results, again = (kernels(arguments, grad, multiprocessors=multiprocessors) for _ in range(2))
    assert_close(results, exact(arguments, grad), 1e-5)
    for one, other in zip(results, again, strict=True):
        assert torch.equal(one, other)


@runs_kernels
def test_takes_any_strides_and_keeps_dense_ones():
    (q, local, gate, kv, norm), grad = draw(2, 4, 2, 20, 16)
    results = kernels((q, local, gate, kv, norm), grad)
    assert [x.stride() for x in results[:3]] == [local.stride(), q.stride(), local.stride()]
    gaps = torch.zeros(2, 4, 25, 40, device=DEVICE)[:, :, 3:23, 8:24].copy_(q)
    across = local.mT.contiguous().mT
    every_second = torch.stack((kv, -kv), dim=1)[:, 0], torch.stack((norm, -norm), dim=1)[:, 0]
    again = kernels((gaps, across, gate, *every_second), grad.contiguous())
    for one, other in zip(results, again, strict=True):
        assert torch.equal(one, other)


@runs_kernels
def test_takes_the_gradient_of_a_sum():
    arguments, _ = draw(1, 2, 1, 20, 16)
    grad = torch.ones((), device=DEVICE).expand(arguments[0].shape)
    assert_close(kernels(arguments, grad), exact(arguments, grad), 1e-5)


@runs_kernels
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("mass", [0.0, 1e-22])
def test_an_empty_memory_leaves_the_local_attention_unchanged(dtype, mass):
    (q, local, gate, kv, norm), grad = draw(1, 4, 2, 20, 16, dtype)
    kv[:, 1], norm[:, 1], local[..., 0] = 0, mass, -0.0
    out, dq, dlocal, dgate, dkv, dnorm = kernels((q, local, gate, kv, norm), grad)
    assert torch.equal(out[:, 2:], local[:, 2:])
    assert out[:, 2:, :, 0].signbit().all()
    assert torch.equal(dlocal[:, 2:], grad[:, 2:])
    for nothing in (dq[:, 2:], dgate[2:], dkv[:, 1], dnorm[:, 1]):
        assert not nothing.any()
    assert not torch.equal(out[:, :2], local[:, :2])


@runs_kernels
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_features_that_underflow(dtype):
    (q, local, gate, kv, norm), grad = draw(1, 2, 1, 20, 16, dtype)
    q[:, :, ::2] = -1e4
    q[:, :, 1::4] = -30.0
    results = kernels((q, local, gate, kv, norm), grad)
    assert torch.equal(results[0][:, :, ::2], local[:, :, ::2])
    assert torch.equal(results[2][:, :, ::2], grad[:, :, ::2])
    assert all(x.isfinite().all() for x in results)
    assert_close(results, exact((q, local, gate, kv, norm), grad), TOLERANCE[dtype])


@runs_kernels
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_memory_beyond_the_range_of_float16(dtype):
    (q, local, gate, kv, norm), grad = draw(1, 2, 1, 20, 16, dtype)
    many = (q, local, gate, kv * 1e12, norm * 1e12)
    assert_close(kernels(many, grad), exact(many, grad), TOLERANCE[dtype])


@runs_kernels
def test_the_normaliser_is_not_rounded_to_bfloat16():
    (q, local, gate, kv, norm), _ = draw(1, 2, 1, 20, 16, torch.bfloat16)
    q, local, kv, norm = q * 0, local.float() * 0, kv * 0 + 1, norm * 0 + 1.003
    out = gated_read_forward(q, local, gate, kv, norm)
    torch.testing.assert_close(out, (gate.sigmoid() / 1.003)[None, :, None, None].expand_as(out))


@runs_kernels
def test_saturated_gates():
    (q, local, gate, kv, norm), grad = draw(1, 2, 1, 20, 16)
    gate.copy_(torch.tensor([-100.0, 100.0]))
    results = kernels((q, local, gate, kv, norm), grad)
    assert torch.equal(results[0][:, 0], local[:, 0])
    assert not results[2][:, 1].any()
    assert results[3].abs().max() < 1e-30
    expected = exact((q, local, gate, kv, norm), grad)
    assert_close((*results[:3], expected[3], *results[4:]), expected, 1e-5)


@runs_kernels
def test_nan_propagates():
    (q, local, gate, kv, norm), _ = draw(1, 2, 1, 20, 16)
    kv[0, 0, 3, 5] = torch.nan
    assert gated_read_forward(q, local, gate, kv, norm)[..., 5].isnan().all()


def draw_sums(n, heads, length, dim, dtype=torch.float32):
    """Arguments, stored as [N, L, H, D], and the gradients of both sums."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    written = tuple(normal(n, length, heads, dim).transpose(1, 2).to(dtype) for _ in range(2))
    grads = normal(n, heads, dim, dim), normal(n, heads, dim)
    return tuple(x.to(DEVICE) for x in written), tuple(x.to(DEVICE) for x in grads)


def sums_kernels(written, grads, **options):
    sums = key_value_sums_forward(*written, **options)
    return *sums, *key_value_sums_backward(*grads, *written, **options)


def exact_sums(written, grads):
    """Equation 8 and autograd's gradients, in float64."""
    keys, values = leaves = [x.double().requires_grad_() for x in written]
    sigma = functional.relu(keys) + keys.clamp(max=0).exp()
    sums = sigma.mT @ values, sigma.sum(2)
    gradients = torch.autograd.grad(sums, leaves, [x.double() for x in grads])
    return *(x.detach() for x in sums), *gradients


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("n", "heads", "length", "dim"),
    [(2, 3, 70, 16), (1, 2, 1, 64), (1, 1, 20, 24), (2, 1, 33, 128), (1, 1, 20, 190)],
)
def test_sums_equal_the_formula_with_all_gradients(n, heads, length, dim, dtype):
    written, grads = draw_sums(n, heads, length, dim, dtype)
    results, expected = sums_kernels(written, grads), exact_sums(written, grads)
    assert [x.dtype for x in results] == [torch.float32] * 2 + [dtype] * 2
    assert_close(results, expected, TOLERANCE[dtype], SUMS)
    assert_close(results[1:2], expected[1:2], 1e-6, ["norm, of features that are not rounded"])


@runs_kernels
@pytest.mark.parametrize("multiprocessors", [1, 3, 132])
def test_sums_of_any_number_of_programs_and_twice_the_same_bits(multiprocessors):
    written, grads = draw_sums(1, 1, 300, 16)
    results, again = (
        sums_kernels(written, grads, multiprocessors=multiprocessors) for _ in range(2)
    )
    assert_close(results, exact_sums(written, grads), 1e-5, SUMS)
    for one, other in zip(results, again, strict=True):
        assert torch.equal(one, other)


@runs_kernels
def test_sums_take_any_strides_and_keep_dense_ones():
    (keys, values), (dkv, dnorm) = draw_sums(2, 3, 20, 16)
    results = sums_kernels((keys, values), (dkv, dnorm))
    assert [x.stride() for x in results[2:]] == [keys.stride(), values.stride()]
    gaps = torch.zeros(2, 3, 25, 40, device=DEVICE)[:, :, 3:23, 8:24].copy_(keys)
    across = values.mT.contiguous().mT
    every_second = torch.stack((dkv, -dkv), 1)[:, 0], torch.stack((dnorm, -dnorm), 1)[:, 0]
    again = sums_kernels((gaps, across), every_second)
    for one, other in zip(results, again, strict=True):
        assert torch.equal(one, other)


@runs_kernels
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_sums_of_features_that_underflow(dtype):
    (keys, values), grads = draw_sums(1, 2, 20, 16, dtype)
    keys[:, :, ::2] = -1e4
    keys[:, :, 1::4] = -30.0
    results = sums_kernels((keys, values), grads)
    assert not results[2][:, :, ::2].any()
    assert not results[3][:, :, ::2].any()
    assert_close(results, exact_sums((keys, values), grads), TOLERANCE[dtype], SUMS)


@runs_kernels
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_sums_and_their_gradients_beyond_the_range_of_float16(dtype):
    (keys, values), grads = draw_sums(1, 2, 20, 16, dtype)
    large = keys * 100, values * 1e4
    assert_close(
        key_value_sums_forward(*large), exact_sums(large, grads)[:2], TOLERANCE[dtype], SUMS[:2]
    )
    small, grads = (keys - 16, values), tuple(x * 1e7 for x in grads)
    assert_close(sums_kernels(small, grads), exact_sums(small, grads), TOLERANCE[dtype], SUMS)


@runs_kernels
def test_nan_propagates_through_the_sums():
    (keys, values), grads = draw_sums(1, 2, 20, 16)
    keys[0, 0, 3, 5], values[0, 1, 4, 6], grads[1][0, 1, 7] = torch.nan, torch.nan, torch.nan
    kv, norm, dkeys, dvalues = sums_kernels((keys, values), grads)
    for lost in (kv[0, 0, 5], norm[0, 0, 5], kv[0, 1, :, 6], dkeys[0, 1, :, 7], dvalues[0, 0, 3]):
        assert lost.isnan().all()
    assert kv.isnan().sum() == 16 + 16
    assert norm.isnan().sum() == 1


@runs_kernels
def test_zero_segments():
    written, grads = draw_sums(0, 2, 20, 16)
    kv, norm, dkeys, dvalues = sums_kernels(written, grads)
    assert (kv.shape, norm.shape) == ((0, 2, 16, 16), (0, 2, 16))
    assert dkeys.shape == dvalues.shape == (0, 2, 20, 16)


@runs_kernels
def test_the_operators_are_these_kernels_on_cuda_and_exact_in_float64():
    arguments, grad = draw(1, 2, 1, 20, 16)
    written, grads = draw_sums(1, 2, 20, 16)
    read, sums = kernels(arguments, grad), sums_kernels(written, grads)

    def on_cuda(double):
        def call(name, *inputs):
            operator = getattr(torch.ops.infini_model, name).default
            cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
            return operator.redispatch(cuda, *(x.double() if double else x for x in inputs))

        yield call("gated_read", *arguments)
        yield from call("gated_read_backward", grad, *arguments)
        yield from call("key_value_sums", *written)
        yield from call("key_value_sums_backward", *grads, *written)

    for one, other in zip(on_cuda(double=False), (*read, *sums), strict=True):
        assert torch.equal(one, other)
    expected = *exact(arguments, grad), *exact_sums(written, grads)
    assert_close(on_cuda(double=True), expected, 1e-12, READ + SUMS)
