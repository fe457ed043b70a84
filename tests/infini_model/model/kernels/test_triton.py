"""The Triton kernels against the formulas in PyTorch, with autograd's gradients.

On CUDA the compiled kernels run. Elsewhere Triton's interpreter runs them in a separate process:
Triton reads TRITON_INTERPRET when it is imported, and another test may have imported it already.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

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
from infini_model.model.kernels.exclusive_scan import exclusive_scan  # noqa: E402
from infini_model.model.kernels.triton import read, scan, shift, write  # noqa: E402
from infini_model.model.kernels.triton.launch import (  # noqa: E402
    gated_read_backward,
    gated_read_forward,
    kernel_constants,
    key_value_sums_backward,
    key_value_sums_forward,
)
from infini_model.model.key_shift import shifted_keys  # noqa: E402

KERNELS = [read.read_forward, read.read_backward, write.sums_forward, write.sums_backward]
# Without a GPU they are skipped here, and test_interpreted runs them.
runs_kernels = pytest.mark.cuda
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
    )
    assert process.returncode == 0, process.stdout + process.stderr


def compiled(kernel, types, constants, aligned, capability, num_warps):
    """The kernel as it is compiled where the arguments `aligned` are multiples of 16 bytes."""
    types = types | dict.fromkeys(constants, "constexpr")
    paths = [
        path
        for at, name in enumerate(kernel.arg_names)
        for path in ([(at, i) for i in range(4)] if isinstance(types[name], tuple) else [(at,)])
        if name in aligned
    ]
    source = ASTSource(
        kernel,
        {name: types[name] for name in kernel.arg_names},
        constants,
        {path: [["tt.divisibility", 16]] for path in paths},
    )
    return triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "enable_fp_fusion": True},
    )


def row_type(dtype):
    """A tensor of rows with its strides."""
    return ({torch.float32: "*fp32", torch.bfloat16: "*bf16"}[dtype], "i32", "i32", "i32")


def compiled_product(kernel, dtype, dim, capability):
    """One of `KERNELS`, for rows that are contiguous."""
    rows = ("grad", "q", "local", "out", "dq", "dlocal", "keys", "values", "dkeys", "dvalues")
    numbers = ("gate", "kv", "norm", "dgate", "dkv", "dnorm")
    counts = dict.fromkeys(("kv_heads", "group", "length", "blocks_per_program"), "i32")
    constants = kernel_constants(torch.empty(1, 1, 1, dim, dtype=dtype), capability // 10)
    del constants["enable_fp_fusion"]
    types = dict.fromkeys(rows, row_type(dtype)) | dict.fromkeys(numbers, "*fp32") | counts
    narrow = kernel is read.read_forward and constants["ROWS"] == 64
    return compiled(kernel, types, constants, rows + numbers, capability, 4 if narrow else 8)


def stack_bytes(cubin, path):
    """Bytes of a thread's stack: what does not fit into its registers."""
    path.write_bytes(cubin)
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [str(program), "--dump-resource-usage", str(path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", printed)[1])


# Compute capability, and what a block may have of a multiprocessor's shared memory (CUDA C++
# Programming Guide, table of technical specifications).
A100, H100, B200 = (80, 163 << 10), (90, 227 << 10), (100, 227 << 10)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.story
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize("gpu", [A100, H100, B200], ids=["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(
    ("dtype", "dim"),
    [(torch.bfloat16, 128), (torch.bfloat16, 256), (torch.float32, 128)],
    ids=str,
)
def test_the_largest_blocks_fit_a_multiprocessor(kernel, gpu, dtype, dim, tmp_path):
    capability, shared = gpu
    binary = compiled_product(kernel, dtype, dim, capability)
    assert binary.metadata.shared <= shared
    assert stack_bytes(binary.asm["cubin"], tmp_path / "cubin") <= 512


def assert_many_fit(binary, shared, path):
    """As many programs of 128 threads as a multiprocessor has threads for, all in registers."""
    assert binary.metadata.shared * (2048 // 128) <= shared
    assert stack_bytes(binary.asm["cubin"], path) == 0


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.story
@pytest.mark.parametrize("from_last", [False, True])
@pytest.mark.parametrize("gpu", [A100, H100, B200], ids=["sm_80", "sm_90", "sm_100"])
def test_a_scan_loads_the_next_sums_while_it_adds(gpu, from_last, tmp_path):
    capability, shared = gpu
    states = ("added", "first", "states", "end")
    types = dict.fromkeys(states, "*fp32") | {"reset": "*i1", "segments": "i32", "size": "i32"}
    constants = {"FROM_LAST": from_last, "BLOCK": scan.BLOCK}
    binary = compiled(scan.scan, types, constants, (*states, "size"), capability, 4)
    # Copies of 16 bytes to shared memory, several of them under way at once.
    assert re.search(r"cp\.async\S* .*, 0x10,", binary.asm["ptx"])
    assert "st.global.v4.b32" in binary.asm["ptx"]
    assert_many_fit(binary, shared, tmp_path / "cubin")


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.story
@pytest.mark.parametrize("kernel", [shift.shift_forward, shift.shift_backward])
@pytest.mark.parametrize("gpu", [A100, H100, B200], ids=["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_shifts_move_16_bytes_at_once(kernel, gpu, dtype, tmp_path):
    capability, shared = gpu
    rows = {"grad", "keys", "out", "dkeys"}.intersection(kernel.arg_names)
    types = dict.fromkeys((*rows, "share", "dshare"), row_type(dtype)) | {"length": "i32"}
    constants = shift.shift_constants(torch.empty(1, 1, 1, 128, dtype=dtype))
    binary = compiled(kernel, types, constants, rows, capability, 4)
    assert "st.global.v4.b32" in binary.asm["ptx"]
    # Each tensor that is read, and its neighbouring rows.
    assert len(re.findall(r"ld\.global\.v4\.b32", binary.asm["ptx"])) >= 2 * (len(rows) - 1)
    assert_many_fit(binary, shared, tmp_path / "cubin")


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


@runs_kernels
@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float32, 136), (torch.bfloat16, 272)], ids=["float32", "bfloat16"]
)
def test_heads_too_wide_for_the_kernels_are_computed_by_the_definition(dtype, dim):
    arguments, grad = draw(1, 2, 1, 20, dim, dtype)
    written, grads = draw_sums(1, 1, 20, dim, dtype)
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    operators = torch.ops.infini_model

    def on_cuda(operator, *inputs):
        with torch.autocast(DEVICE, torch.bfloat16):
            return operator.default.redispatch(cuda, *inputs)

    read = on_cuda(operators.gated_read, *arguments)
    gradients = on_cuda(operators.gated_read_backward, grad, *arguments)
    assert_close((read, *gradients), exact(arguments, grad), TOLERANCE[dtype])
    sums = on_cuda(operators.key_value_sums, *written)
    gradients = on_cuda(operators.key_value_sums_backward, *grads, *written)
    assert_close((*sums, *gradients), exact_sums(written, grads), TOLERANCE[dtype], SUMS)
    for one, other in zip(sums, operators.key_value_sums(*written), strict=True):
        assert torch.equal(one, other)


def draw_scan(rows, segments, *shape, dtype=torch.float32):
    """Sums, a first state and resets."""
    generator = torch.Generator().manual_seed(segments)
    added = torch.randn(rows, segments, *shape, generator=generator, dtype=torch.float64)
    first = torch.randn(rows, *shape, generator=generator, dtype=torch.float64)
    reset = torch.rand(rows, segments + 1, generator=generator) < 0.3
    return added.to(DEVICE, dtype), first.to(DEVICE, dtype), reset.to(DEVICE)


@runs_kernels
@pytest.mark.parametrize("from_last", [False, True])
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("rows", "segments", "shape"),
    [(2, 5, (3, 16, 16)), (1, 1, (2, 24)), (3, 9, (1, 7)), (2, 0, (2, 8)), (0, 3, (2, 8))],
)
def test_a_scan_gives_the_bits_of_its_definition(rows, segments, shape, dtype, resets, from_last):
    added, first, reset = draw_scan(rows, segments, *shape, dtype=dtype)
    reset = reset if resets else None
    found = scan.exclusive_scan(added, first, reset, from_last=from_last)
    on_cpu = (x if x is None else x.cpu() for x in (added, first, reset))
    expected = exclusive_scan(*on_cpu, from_last=from_last)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.cpu(), other)


@runs_kernels
def test_a_scan_takes_any_strides_and_lets_nothing_past_a_reset():
    added, first, reset = draw_scan(2, 6, 3, 16, 16)
    every_second = torch.stack((added, -added), dim=2)[:, :, 0]
    transposed = first.mT.contiguous().mT
    expected = scan.exclusive_scan(added, first, reset)
    found = scan.exclusive_scan(every_second, transposed, reset.T.contiguous().T)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    added[:, :3], reset[:, 3] = torch.nan, True
    states, end = scan.exclusive_scan(added, first * torch.inf, reset)
    assert states[:, 3:].isfinite().all()
    assert end.isfinite().all()


@runs_kernels
def test_the_scan_is_this_kernel_on_cuda():
    added, first, reset = draw_scan(2, 6, 3, 16, 16)
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    operator = torch.ops.infini_model.exclusive_scan.default
    found = operator.redispatch(cuda, added, first, reset, from_last=True)
    for one, other in zip(
        found, scan.exclusive_scan(added, first, reset, from_last=True), strict=True
    ):
        assert torch.equal(one, other)


def draw_shift(batch, heads, length, dim, dtype=torch.float32):
    """Keys and a gradient, stored as [B, T, H, D], and shares, of which the first are 0."""
    generator = torch.Generator().manual_seed(length)
    shape = (batch, length, heads, dim)
    keys, grad = (torch.randn(shape, generator=generator).transpose(1, 2) for _ in range(2))
    share = torch.rand(batch, heads, length, generator=generator)
    share[:, :, 0] = 0.0
    return tuple(x.to(DEVICE, dtype) for x in (keys, share, grad))


def shift_kernels(keys, share, grad):
    return shift.shifted_keys_forward(keys, share), *shift.shifted_keys_backward(grad, keys, share)


SHIFTS = ("shifted", "dkeys", "dshare")


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("batch", "heads", "length", "dim"),
    [(2, 3, 35, 16), (1, 2, 1, 64), (2, 1, 70, 24), (1, 1, 130, 128), (1, 2, 20, 190)],
)
def test_shifts_equal_a_lerp_with_all_gradients(batch, heads, length, dim, dtype):
    keys, share, grad = draw_shift(batch, heads, length, dim, dtype)
    results = shift_kernels(keys, share, grad)
    assert {x.dtype for x in results} == {dtype}
    assert [x.stride() for x in results[:2]] == [keys.stride()] * 2
    leaves = [x.double().requires_grad_() for x in (keys, share)]
    before = torch.cat((leaves[0][:, :, :1], leaves[0][:, :, :-1]), dim=2)
    out = torch.lerp(leaves[0], before, leaves[1].unsqueeze(-1))
    expected = out.detach(), *torch.autograd.grad(out, leaves, grad.double())
    assert_close(results, expected, TOLERANCE.get(dtype, 1e-14), SHIFTS)


@runs_kernels
def test_shifts_take_any_strides():
    keys, share, grad = draw_shift(2, 3, 35, 16)
    gaps = torch.zeros(2, 3, 40, 40, device=DEVICE)[:, :, 3:38, 8:24].copy_(keys)
    found = shift_kernels(gaps, share.mT.contiguous().mT, grad.mT.contiguous().mT)
    for one, other in zip(found, shift_kernels(keys, share, grad), strict=True):
        assert torch.equal(one, other)


@runs_kernels
def test_the_shift_is_these_kernels_on_cuda():
    keys, share, grad = draw_shift(2, 3, 35, 16)
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    operators = torch.ops.infini_model
    found = (
        operators.shifted_keys.default.redispatch(cuda, keys, share),
        *operators.shifted_keys_backward.default.redispatch(cuda, grad, keys, share),
    )
    for one, other in zip(found, shift_kernels(keys, share, grad), strict=True):
        assert torch.equal(one, other)
    assert_close(found[:1], [shifted_keys(keys.cpu(), share.cpu())], 1e-6, SHIFTS[:1])
