"""The Triton kernels against what the CPU computes in float64, with autograd's gradients.

On CUDA the compiled kernels run; with TRITON_INTERPRET=1 Triton's interpreter runs them on the CPU.
What a GPU would get is compiled in a process of its own, since Triton reads that variable when it
is imported: run as a program, this file prints it.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip(
    "triton", reason="triton is not installed: CPU builds of torch bring none"
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from infini_model.model.kernels import memory_ops  # noqa: E402
from infini_model.model.kernels import triton_launch as launch  # noqa: E402
from infini_model.model.kernels import triton_residual as residual  # noqa: E402
from infini_model.model.kernels import triton_scan as scan  # noqa: E402
from infini_model.model.kernels import triton_shift as shift  # noqa: E402
from infini_model.model.kernels.scan import exclusive_scan  # noqa: E402

cuda = pytest.mark.cuda
CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
# Largest error allowed against float64, relative to the largest number in the result.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
ALL_DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
KERNELS = {
    "residual_read": (residual.residual_read_forward, residual.residual_read_backward),
    "residual_sums": (residual.residual_sums_forward, residual.residual_sums_backward),
    "shifted_keys": (shift.shifted_keys_forward, shift.shifted_keys_backward),
}
NAMES = {
    "residual_read": ("out", "dq", "dweight", "dkv"),
    "residual_sums": ("kv", "dkeys", "dvalues", "dscale"),
    "shifted_keys": ("shifted", "dkeys", "dshare"),
}
EACH = pytest.mark.parametrize("name", KERNELS)
SMALL = (2, 4, 2, 20, 16)


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    if INTERPRETED:
        # Here, as this file is a program, too, which finds no other test.
        from triton_interpreter import mend

        mend(monkeypatch)


def draw(name, shape=SMALL, dtype=torch.float32):
    """Arguments of an operator, the rows stored as [N, L, H, D], and gradients of its results."""
    n, heads, kv_heads, length, dim = shape
    generator = torch.Generator().manual_seed(length)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    def rows():
        return normal(n, length, heads, dim).transpose(1, 2).to(dtype)

    if name == "residual_read":
        kv = normal(n, kv_heads, 2 * dim, dim)
        arguments, grads = (rows(), rows(), normal(heads, dim), kv), [rows()]
    elif name == "residual_sums":
        scale = torch.rand(n, heads, length, generator=generator)
        arguments, grads = (rows(), rows(), scale), [normal(n, heads, 2 * dim, dim)]
    else:
        share = torch.rand(n, heads, length, generator=generator)
        share[:, :, 0] = 0.0
        arguments, grads = (rows(), share.to(dtype)), [rows()]
    return [x.to(DEVICE) for x in arguments], [x.to(DEVICE) for x in grads]


def as_list(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


def run(name, arguments, grads, **options):
    """The results of the kernels, and the gradients of the arguments."""
    forward, backward = KERNELS[name]
    results = as_list(forward(*arguments, **options))
    return results + as_list(backward(*grads, *saved(name, arguments), **options))


def saved(name, arguments):
    """The arguments that the backward pass takes: the gradient of a sum needs no summand."""
    return [x for i, x in enumerate(arguments) if (name, i) != ("residual_read", 1)]


def differentiated(function, name, arguments, grads, *, autocast=False):
    """The same by autograd."""
    leaves = [x.detach().requires_grad_() for x in arguments]
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        results = as_list(function(*leaves))
    gradients = torch.autograd.grad(results, saved(name, leaves), grads)
    return [x.detach() for x in results] + list(gradients)


def function(name):
    """What the model calls: the kernels on CUDA, where they can, and else plain PyTorch."""
    return getattr(memory_ops, name)


def exact(name, arguments, grads):
    """The same in float64 on the CPU, where the definition of the attention vouches for it."""
    wide = ([x.cpu().double() for x in each] for each in (arguments, grads))
    return differentiated(function(name), name, *wide)


def assert_close(name, results, expected, tolerance):
    for part, result, should in zip(NAMES[name], results, expected, strict=True):
        assert result.shape == should.shape, part
        error = (result.cpu().double() - should).abs().max()
        # A number of dscale sums 2 D² products that were rounded, of either sign.
        limit = tolerance * should.abs().max() * (2 if part == "dscale" else 1)
        assert error <= limit, f"{part}: {error} of {should.abs().max()}"


def assert_same_bits(results, expected):
    for one, other in zip(results, expected, strict=True):
        assert torch.equal(one.cpu(), other.cpu())


@cuda
@EACH
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, (2, 4, 2, 35, 16)),
        (torch.float32, (1, 3, 1, 20, 24)),
        (torch.float32, (1, 2, 1, 17, 128)),
        (torch.bfloat16, (1, 2, 2, 1, 64)),
        (torch.bfloat16, (1, 2, 1, 33, 128)),
        (torch.bfloat16, (1, 2, 1, 20, 190)),
    ],
    ids=str,
)
def test_equals_float64_with_all_gradients(name, shape, dtype):
    arguments, grads = draw(name, shape, dtype)
    results = run(name, arguments, grads)
    of_memory = {"kv", "dkv", "dweight", "dscale"}
    expected = [torch.float32 if part in of_memory else dtype for part in NAMES[name]]
    assert [x.dtype for x in results] == expected
    assert_close(name, results, exact(name, arguments, grads), TOLERANCE[dtype])


@cuda
@EACH
def test_the_operator_is_the_kernel(name):
    case, operator = draw(name), getattr(torch.ops.infini_model, name)
    assert_same_bits(differentiated(operator, name, *case), run(name, *case))
    leaves = [x.requires_grad_() for x in case[0]]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator.default, leaves, test_utils=checks)
    if not INTERPRETED:
        assert_same_bits(differentiated(function(name), name, *case), run(name, *case))


@cuda
@EACH
@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float64, 16), (torch.float32, 136), (torch.bfloat16, 272)], ids=str
)
def test_float64_and_wide_heads_are_computed_whatever_the_kernels_can(name, dtype, dim):
    """What does not fit a multiprocessor is computed as on the CPU; autocast changes nothing."""
    arguments, grads = draw(name, (1, 2, 1, 20, dim), dtype)
    if dtype == torch.float64:
        arguments, grads = ([x.double() for x in each] for each in (arguments, grads))
    results = differentiated(function(name), name, arguments, grads, autocast=True)
    assert_close(name, results, exact(name, arguments, grads), TOLERANCE.get(dtype, 1e-12))


@cuda
def test_a_residual_memory_is_summed_by_any_number_of_programs(monkeypatch):
    (keys, values, scale), _ = draw("residual_sums", (1, 4, 4, 100, 16))
    for factors in (scale, None):
        weighed = torch.ones_like(scale) if factors is None else factors
        expected = exact("residual_sums", (keys, values, weighed), [keys.new_zeros(1, 4, 32, 16)])
        expected = expected[0].view(1, 2, 2, 32, 16).sum(2) if factors is None else expected[0]
        for multiprocessors in (1, 3, 132):
            monkeypatch.setattr(launch, "MULTIPROCESSORS", multiprocessors)
            heads = 2 if factors is None else 4  # of two heads each, as for the gradient of a read
            arguments = (keys, values, factors, heads)
            found, again = (residual.feature_sums(*arguments) for _ in range(2))
            assert (found.cpu().double() - expected).abs().max() <= 1e-5 * expected.abs().max()
            assert_same_bits([again], [found])


LAYOUTS = {
    "rows apart": lambda x: torch.cat((x, -x), -1)[..., : x.size(-1)],
    "numbers apart": lambda x: torch.stack((x, -x), -1)[..., 0],
}


@cuda
@EACH
def test_takes_any_strides_and_keeps_dense_ones(name):
    arguments, grads = draw(name)
    results = run(name, arguments, grads)
    rows = [x.stride() for x in results if x.shape == arguments[0].shape]
    assert len(rows) >= 2
    assert set(rows) == {arguments[0].stride()}
    for layout in LAYOUTS.values():
        assert_same_bits(
            run(name, *([layout(x) for x in each] for each in (arguments, grads))), results
        )
    # As the gradient of a sum is stored.
    ones = [torch.ones_like(x) for x in grads]
    expanded = [torch.ones((), device=DEVICE).expand(x.shape) for x in grads]
    assert_same_bits(run(name, arguments, expanded), run(name, arguments, ones))


@cuda
@ALL_DTYPES
def test_a_residual_memory_that_is_empty_or_weighs_nothing_changes_no_bit(dtype):
    (q, local, weight, kv), grads = draw("residual_read", (1, 6, 3, 20, 16), dtype)
    kv[:, 1], weight[0] = 0.0, 0.0
    out, dq, _, _ = run("residual_read", (q, local, weight, kv), grads)
    for unread in (0, 2, 3):
        assert torch.equal(out[:, unread], local[:, unread])
        assert not dq[:, unread].any()
    assert not torch.equal(out[:, 1], local[:, 1])


@cuda
@pytest.mark.parametrize(
    ("name", "part", "dtype"),
    # What is written is of the dtype, so float16 cannot hold it.
    [("residual_read", 3, dtype) for dtype in TOLERANCE]
    + [("residual_sums", 1, dtype) for dtype in (torch.float32, torch.bfloat16)],
    ids=str,
)
def test_numbers_beyond_the_range_of_float16(name, part, dtype):
    """A memory is large, or what is written to it."""
    arguments, grads = draw(name, (1, 2, 1, 20, 16), dtype)
    arguments[part] *= 1e7
    results = run(name, arguments, grads)
    assert all(x.isfinite().all() for x in results)
    assert_close(name, results, exact(name, arguments, grads), TOLERANCE[dtype])


@cuda
def test_nan_propagates():
    (q, local, weight, kv), _ = draw("residual_read", (1, 2, 1, 20, 16))
    kv[0, 0, 3, 5] = torch.nan
    assert residual.residual_read_forward(q, local, weight, kv).isnan().all()
    (keys, values, scale), grads = draw("residual_sums", (1, 2, 2, 20, 16))
    keys[0, 0, 3, 5] = torch.nan
    kv, _, dvalues, _ = run("residual_sums", (keys, values, scale), grads)
    assert all(lost.isnan().all() for lost in (kv[0, 0], dvalues[0, 0, 3]))


@cuda
def test_zero_segments():
    kv, dkeys, dvalues, dscale = run("residual_sums", *draw("residual_sums", (0, 2, 2, 20, 16)))
    assert (kv.shape, dscale.shape) == ((0, 2, 32, 16), (0, 2, 20))
    assert dkeys.shape == dvalues.shape == (0, 2, 20, 16)


def draw_scan(rows, segments, *shape, dtype=torch.float32):
    """Sums, a first state, resets and what is kept."""
    generator = torch.Generator().manual_seed(segments)
    added = torch.randn(rows, segments, *shape, generator=generator, dtype=torch.float64)
    first = torch.randn(rows, *shape, generator=generator, dtype=torch.float64)
    reset = torch.rand(rows, segments + 1, generator=generator) < 0.3
    kept = torch.rand(rows, segments, shape[0], generator=generator, dtype=torch.float64)
    added, first, kept = (x.to(DEVICE, dtype) for x in (added, first, kept))
    return added, first, reset.to(DEVICE), kept


@cuda
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("rows", "segments", "shape"),
    [(2, 5, (3, 16, 16)), (1, 1, (2, 24)), (3, 9, (1, 7)), (2, 0, (2, 8)), (0, 3, (2, 8))],
)
def test_a_scan_gives_the_bits_of_the_cpu(rows, segments, shape, dtype, reverse):
    added, first, resets, factors = draw_scan(rows, segments, *shape, dtype=dtype)
    operator = torch.ops.infini_model.exclusive_scan.default
    for reset, kept in itertools.product((resets, None), (factors, None)):
        inputs = (added, first, reset, kept)
        found = scan.exclusive_scan(*inputs, reverse=reverse)
        on_cpu = (x if x is None else x.cpu() for x in inputs)
        assert_same_bits(found, exclusive_scan(*on_cpu, reverse=reverse))
        registered = operator.redispatch(CUDA, *inputs, reverse=reverse)
        assert_same_bits(registered, found)


@cuda
def test_a_scan_takes_any_strides_and_lets_nothing_past_a_reset():
    added, first, reset, kept = draw_scan(2, 6, 3, 16, 16)
    expected = scan.exclusive_scan(added, first, reset, kept)
    for layout in LAYOUTS.values():
        inputs = (*map(layout, (added, first)), reset, kept)
        assert_same_bits(scan.exclusive_scan(*inputs), expected)
    transposed = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (reset, kept))
    assert_same_bits(scan.exclusive_scan(added, first, *transposed), expected)
    added[:, :3], reset[:, 3] = torch.nan, True
    states = scan.exclusive_scan(added, first * torch.inf, reset, kept)
    assert states[:, 3:].isfinite().all()


# What a block may have of a multiprocessor's shared memory, by compute capability (CUDA C++
# Programming Guide, table of technical specifications), in KiB.
SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
# Arguments of the kernels: rows with their strides, and numbers of the memory.
ROWS = {"grad", "q", "local", "out", "dq", "keys", "values", "dkeys", "dvalues", "x"}
STATES = {"kv", "dkv", "weight", "dweight", "scale", "dscale"}
# For each capability the kernels, dtypes and widths of a head that leave least room.
PRODUCTS = [
    (75, residual.read_backward, "bf16", 256),
    (86, residual.sums_forward, "bf16", 256),
    (90, residual.sums_forward, "bf16", 128),
    (120, residual.sums_backward, "fp32", 128),
]


def shared_bytes(capability, kernel, dtype, dim):
    """What a block takes of the shared memory, for contiguous rows that are aligned to 16 bytes."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    row = torch.empty(1, 1, 1, dim, dtype=dtypes[dtype])
    by_tiles = kernel in (residual.read_forward, residual.read_backward, residual.sums_backward)
    chosen = residual.row_constants if by_tiles else launch.kernel_constants
    constants = chosen(row, SHARED[capability] << 10)
    del constants["enable_fp_fusion"]
    types, aligned = dict.fromkeys(kernel.arg_names, "i32"), []
    for at, name in enumerate(kernel.arg_names):
        if name in ROWS:
            types[name] = (f"*{dtype}", "i32", "i32", "i32")
            aligned += [(at, i) for i in range(4)]
        elif name == "dread":
            types[name] = ("*bf16" if dtype == "bf16" else "*fp32", "i32", "i32", "i32")
            aligned += [(at, i) for i in range(4)]
        elif name in STATES:
            types[name] = "*fp32"
            aligned.append((at,))
    source = ASTSource(
        kernel,
        types | dict.fromkeys(constants, "constexpr"),
        constants,
        {path: [["tt.divisibility", 16]] for path in aligned},
    )
    options = {"num_warps": 8, "enable_fp_fusion": True}
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options).metadata.shared


def test_what_is_compiled_fits_a_multiprocessor():
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[4])
    command = [sys.executable, __file__]
    printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
    for taken, (capability, *product) in zip(json.loads(printed), PRODUCTS, strict=True):
        assert taken <= SHARED[capability] << 10, (capability, *product)


if __name__ == "__main__":
    print(json.dumps([shared_bytes(*each) for each in PRODUCTS]))
