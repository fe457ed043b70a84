"""`infini_attention` against its definition, the paper's equations segment by segment."""

import contextlib
import math

import pytest
import torch
from attention_by_segment import attention_by_segment
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from infini_model.model.attention import infini_attention
from infini_model.model.kernels.attention import local_attention, resolve_backend
from infini_model.model.memory import RULES, Memory
from infini_model.model.memory.paper import feature_map
from infini_model.model.rotary import rope_tables, rotate
from infini_model.runtime.errors import ConfigError
from infini_model.training.distributed import deterministic_algorithms

UPDATES = ["linear", "delta", "residual"]
EACH = pytest.mark.parametrize("update", UPDATES)


def draw(batch, heads, kv_heads, tokens, dim, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q = normal(batch, heads, tokens, dim)
    k, v, keys = (normal(batch, kv_heads, tokens, dim) for _ in range(3))
    return q, k, v, normal(heads), keys, generator


def weighed(update, q, read_weight):
    """What an update takes in the place of `read_weight`."""
    return (
        read_weight[:, None] * torch.linspace(-1, 1, q.size(3)).to(read_weight)
        if update == "residual"
        else read_weight
    )


@st.composite
def cases(draw_one):
    kv_heads = draw_one(st.integers(1, 2))
    length = draw_one(st.integers(1, 5))
    tokens = draw_one(st.integers(1, 4 * length + 2))
    q, k, v, read_weight, keys, generator = draw(
        draw_one(st.integers(1, 2)),
        kv_heads * draw_one(st.integers(1, 3)),
        kv_heads,
        tokens,
        4,
        seed=draw_one(st.integers(0, 1000)),
    )
    memory = document_starts = rope = memory_keys = written = queries = gates = None
    rows, update = q.size(0), draw_one(st.sampled_from(UPDATES))
    if draw_one(st.booleans()):
        rows = draw_one(st.sampled_from([1, rows]))
        memory_keys, written = (
            torch.randn(rows, kv_heads, tokens, 4, generator=generator).double() for _ in range(2)
        )
    elif draw_one(st.booleans()):
        memory_keys = keys
    if draw_one(st.booleans()):
        queries = torch.randn(q.shape, generator=generator).double()
    if draw_one(st.booleans()):
        held = functional.elu(torch.randn(rows, kv_heads, 7, 4, generator=generator).double())
        memory = Memory((held + 1).mT @ held, (held + 1).sum(2))
        if update == "residual":
            memory = Memory(torch.cat((memory.kv, -memory.kv.mT), 2), None)
    if update == "residual" and draw_one(st.booleans()):
        gates = torch.rand(rows, kv_heads, tokens, 2, generator=generator).double()
        gates[..., 1].log_()
    if draw_one(st.booleans()):
        shape = (rows, -(-tokens // length))
        document_starts = torch.rand(shape, generator=generator) < draw_one(
            st.sampled_from([0.2, 0.7])
        )
    sight = {"window_segments": draw_one(st.integers(0, 2))}
    sight["window_sinks"] = draw_one(st.integers(0, length))
    if draw_one(st.booleans()):
        older = sight["window_sinks"] + sight["window_segments"] * length
        rope = tuple(table.double() for table in rope_tables(length, 4, 100.0, before=older))
    sight["causal"] = draw_one(st.booleans())
    own = {"memory_keys": memory_keys, "memory_values": written, "memory_queries": queries}
    own["memory_gates"] = gates
    return (
        (q, k, v, weighed(update, q, read_weight)),
        length,
        rope,
        memory,
        update,
        document_starts,
        own,
        sight,
    )


def parts(memory):
    return [each for each in memory if each is not None]


def outputs_and_gradients(function, case, dtype):
    """The results of `function` for a case, and the gradients of a loss over all of them."""
    tensors, length, rope, memory, update, document_starts, own, sight = case
    leaves = [x.to(dtype).requires_grad_() for x in tensors]
    held = None if memory is None else memory.map(lambda x: x.to(dtype).requires_grad_())
    own = {name: x.to(dtype).requires_grad_() for name, x in own.items() if x is not None}
    out, after = function(
        *leaves,
        segment_length=length,
        rope=None if rope is None else tuple(table.to(dtype) for table in rope),
        memory=held,
        update=update,
        document_starts=document_starts,
        **sight,
        **own,
    )
    everything = [out, *parts(after)]
    weights = [torch.linspace(-1, 1, x.numel()).to(dtype).view_as(x) for x in everything]
    loss = sum((x * w).sum() for x, w in zip(everything, weights, strict=True))
    inputs = [*leaves, *parts(held or ()), *own.values()]
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
    return everything + [
        torch.zeros_like(x) if g is None else g for g, x in zip(gradients, inputs, strict=True)
    ]


def test_the_gradient_of_the_rotation_is_that_of_its_definition():
    x, weights = torch.randn(2, 3, 2, 5, 8).double()
    rope = tuple(torch.randn(5, 8).double() for _ in range(2))
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate(x, rope), x)
    exact = torch.autograd.grad(rotate(x, rope), x, weights)[0]
    narrow = x.detach().bfloat16().requires_grad_()
    turned = rotate(narrow, tuple(table.float() for table in rope))
    rounded = torch.autograd.grad(turned, narrow, weights.bfloat16())[0]
    # Rounded once, beside the rounding of what comes in.
    torch.testing.assert_close(rounded.double(), exact, rtol=2**-7, atol=2**-6)


@given(cases())
@settings(max_examples=80, derandomize=True)
def test_equals_the_paper_with_all_gradients(case):
    exact = outputs_and_gradients(attention_by_segment, case, torch.float64)
    wide, narrow = (
        outputs_and_gradients(infini_attention, case, dtype)
        for dtype in (torch.float64, torch.float32)
    )
    torch.testing.assert_close(wide, exact, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(narrow, exact, strict=True):
        assert (ours - theirs).abs().max() < 1e-5 * (1.0 + theirs.abs().max())


def test_one_segment_is_local_attention_exactly():
    q, k, v, read_weight, *_ = draw(2, 4, 2, 8, 4, dtype=torch.float32)
    out, _ = infini_attention(q, k, v, read_weight, segment_length=8)
    assert torch.equal(out, local_attention(q, k, v))
    longer, _ = infini_attention(q, k, v, read_weight, segment_length=20)
    assert torch.equal(out, longer)


@EACH
def test_tokens_after_a_document_start_are_independent_of_those_before(update):
    q, k, v, read_weight, *_ = draw(2, 2, 1, 24, 4, dtype=torch.float32)
    k[:, :, :12] = float("inf")  # even non-finite values do not reach past it
    v[:, :, :12] = float("nan")
    document_starts, read_weight = (
        torch.zeros(2, 6, dtype=torch.bool),
        weighed(update, q, read_weight),
    )
    document_starts[:, 3] = True
    out, memory = infini_attention(
        q, k, v, read_weight, segment_length=4, document_starts=document_starts, update=update
    )
    alone, memory_alone = infini_attention(
        *(x[:, :, 12:] for x in (q, k, v)), read_weight, segment_length=4, update=update
    )
    torch.testing.assert_close(out[:, :, 12:], alone)
    torch.testing.assert_close(memory, memory_alone)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_residual_memory_that_is_empty_or_weighs_nothing_changes_no_bit(dtype):
    q, k, v, read_weight, *_ = draw(1, 4, 2, 20, 8, dtype=dtype)
    weight = weighed("residual", q, read_weight)
    everywhere = torch.ones(1, 5, dtype=torch.bool)
    local, _ = infini_attention(q, k, v, read_weight, segment_length=4, document_starts=everywhere)
    out, _ = infini_attention(q, k, v, weight * 0, segment_length=4, update="residual")
    assert torch.equal(out, local)
    out, _ = infini_attention(q, k, v, weight, segment_length=4, update="residual")
    assert torch.equal(out[:, :, :4], local[:, :, :4])
    assert not torch.equal(out, local)
    nothing = torch.zeros(1, 2, 20, 2, dtype=torch.promote_types(dtype, torch.float32))
    settings = {"segment_length": 4, "update": "residual", "memory_gates": nothing}
    assert torch.equal(infini_attention(q, k, v, weight, **settings)[0], local)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finite_whatever_the_magnitude(dtype, update):
    # Both at 1e4 would make scores of 1e8, whose rounding alone is beyond any softmax in float32.
    for query, key in (
        (0.0, 1e4),
        (1e4, 0.0),
        (-1e4, 0.0),
        (-300.0, -300.0),
        (-1e4, -50.0),
        (-22.0, -20.0),
        (-18.0, -20.0),
    ):
        q, k, v, read_weight, *_ = draw(1, 2, 1, 12, 4, dtype=dtype)
        leaves = [(x + shift).requires_grad_() for x, shift in ((q, query), (k, key), (v, 0))]
        read_weight = weighed(update, q, read_weight)
        out, memory = infini_attention(*leaves, read_weight, segment_length=4, update=update)
        assert out.dtype == dtype
        assert {x.dtype for x in parts(memory)} == {torch.float32}
        gradients = torch.autograd.grad(out.float().sum(), leaves)
        assert all(x.isfinite().all() for x in (out, *parts(memory), *gradients)), (query, key)


@EACH
def test_autocast_changes_no_bit(update):
    *leaves, read_weight, _, _ = draw(1, 2, 1, 12, 4, dtype=torch.bfloat16)
    leaves, results = [*leaves, weighed(update, leaves[0], read_weight)], []
    for enabled in (False, True):
        inputs = [x.clone().requires_grad_() for x in leaves]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out, memory = infini_attention(*inputs, segment_length=4, update=update)
        gradients = torch.autograd.grad(out.float().sum() + memory.kv.sum(), inputs)
        results.append((out, *parts(memory), *gradients))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_delta_is_the_papers_rule_where_the_memory_outweighs_the_segment():
    q, k, v, read_weight, *_ = draw(1, 1, 1, 6, 4)
    held = Memory(torch.linspace(-1, 1, 16).double().view(1, 1, 4, 4), q.new_full((1, 1, 4), 99.0))
    _, after = infini_attention(q, k, v, read_weight, segment_length=3, memory=held, update="delta")
    m, z = held.kv[0, 0], held.norm[0, 0]
    for here in (slice(0, 3), slice(3, 6)):
        sigma = functional.elu(k[0, 0, here]) + 1
        m = m + sigma.T @ (v[0, 0, here] - sigma @ m / (sigma @ z)[:, None])
        z = z + sigma.sum(0)
    torch.testing.assert_close(after.kv[0, 0], m, rtol=1e-12, atol=1e-12)


def test_feature_map_is_precise_in_value_and_gradient():
    x = torch.tensor([-30.0, -1.0, 0.0, 2.0], requires_grad=True)
    y = feature_map(x)
    expected = [math.exp(-30), math.exp(-1), 1.0, 3.0]
    torch.testing.assert_close(y.double(), torch.tensor(expected).double(), rtol=1e-6, atol=0)
    (slope,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(slope, torch.tensor([*expected[:3], 1.0]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("tokens", "length"), [(16, 7), (302, 150), (3, 8)])
def test_longer_segments_equal_the_paper(causal, tokens, length):
    """With a memory and with one that is emptied everywhere; the last segments are not full."""
    q, k, v, read_weight, *_ = draw(2, 4, 2, tokens, 8)
    rope = tuple(table.double() for table in rope_tables(length, 8, 100.0))
    settings = {"segment_length": length, "rope": rope, "causal": causal}
    everywhere = torch.ones(2, -(-tokens // length), dtype=torch.bool)
    for settings["document_starts"] in (None, everywhere):
        ours, _ = infini_attention(q, k, v, read_weight, **settings)
        exact, _ = attention_by_segment(q, k, v, read_weight, **settings)
        torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.cuda
@pytest.mark.parametrize("backend", ["auto", "flash", "sdpa"])
@pytest.mark.parametrize("causal", [True, False])
def test_kernels_of_a_gpu_equal_the_paper(gpu, backend, causal):
    if backend == "flash":
        pytest.importorskip("flash_attn")
    q, k, v, read_weight, *_ = draw(2, 4, 4, 128, 64, dtype=torch.bfloat16)
    on_gpu = (x.to(gpu) for x in (q, k, v))
    ours = local_attention(*on_gpu, backend=backend, causal=causal)
    wide = (x.double() for x in (q, k, v, read_weight))
    exact, _ = attention_by_segment(*wide, segment_length=128, causal=causal)
    torch.testing.assert_close(ours.double().cpu(), exact, rtol=0.02, atol=0.02)


@pytest.fixture
def install(monkeypatch):
    """Makes distributions look installed."""
    function = "infini_model.model.kernels.attention.installed_version"
    return lambda *names: monkeypatch.setattr(function, dict.fromkeys(names, "9.9").get)


@pytest.fixture
def resolve(monkeypatch):
    """`resolve_backend` on a GPU of a compute capability."""

    def on_gpu(backend, capability, dtype, head_dim):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        return resolve_backend(backend, torch.device("cuda"), dtype, head_dim)

    return on_gpu


@pytest.mark.parametrize(
    ("capability", "head_dim", "strict", "kernel"),
    [
        ((7, 5), 128, True, "sdpa"),
        ((8, 0), 128, True, "flash-attn"),  # not hidden by version 4
        ((9, 0), 128, True, "flash-attn-4"),
        ((9, 0), 256, True, "flash-attn"),
        ((12, 0), 128, False, "flash-attn-4"),
        ((12, 0), 128, True, "flash-attn"),
    ],
)
def test_the_flash_attn_that_suits_the_gpu(install, resolve, capability, head_dim, strict, kernel):
    install("flash-attn-4", "flash-attn")
    with deterministic_algorithms() if strict else contextlib.nullcontext():
        for dtype in (torch.bfloat16, torch.float16):
            assert resolve("auto", capability, dtype, head_dim) == kernel
            assert resolve("sdpa", capability, dtype, head_dim) == "sdpa"
    for backend in ("auto", "flash"):  # which takes 16 bits
        assert resolve(backend, capability, torch.float32, head_dim) == "sdpa"


def test_a_kernel_that_does_not_suit_the_gpu_or_the_setting_is_refused(install, resolve):
    with pytest.raises(ConfigError, match=r"flash-attn is not installed: pip install"):
        resolve("flash", (8, 0), torch.bfloat16, 128)
    install("flash-attn-4")
    assert resolve("auto", (8, 0), torch.bfloat16, 128) == "sdpa"
    with pytest.raises(ConfigError, match=r"got 'flash', but what is installed"):
        resolve("flash", (8, 0), torch.bfloat16, 128)


@pytest.mark.cuda
def test_grouped_heads_in_float32_compute_no_scores_of_all_pairs(gpu):
    if gpu.type == "cpu":
        pytest.skip("counts what a GPU allocates")
    drawn = draw(1, 8, 2, 4096, 64, dtype=torch.float32)
    q, k, v = (x.to(gpu) for x in drawn[:3])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    local_attention(q, k, v)
    assert torch.cuda.max_memory_allocated() - before < 8 * 4096 * 4096


@EACH
def test_a_million_tokens_drift_less_than_a_thousandth(update):
    length, chunk, chunks = 64, 1 << 15, 32
    generator = torch.Generator().manual_seed(0)
    read_weight, memory, exact = torch.ones(1), None, None
    for _ in range(chunks):
        q, k, v = (torch.randn(1, 1, chunk, 4, generator=generator) for _ in range(3))
        weight = weighed(update, q, read_weight)
        out, memory = infini_attention(
            q, k, v, weight, segment_length=length, memory=memory, update=update
        )
        wide = (x.double() for x in (q, k, v, weight))
        expected, exact = infini_attention(
            *wide, segment_length=length, memory=exact, update=update
        )
        assert (out - expected).abs().max() < 1e-3 * expected.abs().max()
        assert (memory.kv - exact.kv).abs().max() < 1e-3 * exact.kv.abs().max()
    assert chunk * chunks >= 1_000_000


Q, K, V, READ_WEIGHT = draw(2, 4, 2, 6, 8, dtype=torch.float32)[:4]
EMPTY = RULES["linear"].empty(torch.zeros(2, 2, 1, 8))


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "k: expected a number of heads that divides q's 4, got 3", {"k": Q[:, :3]}),
        (ValueError, r"k: expected shape \[2, 2, 6, 8\], got \[2, 2, 5, 8\]", {"k": K[:, :, :5]}),
        (TypeError, "v: expected dtype torch.float32, got torch.float16", {"v": V.half()}),
        (ValueError, r"memory_values: expected shape \[1, 2, 6, 8\]", {"memory_keys": K[:1]}),
        (ValueError, "segment_length: expected at least 1, got 0", {"segment_length": 0}),
        (
            ValueError,
            "update: expected one of linear, delta, residual, got 'none'",
            {"update": "none"},
        ),
        (
            TypeError,
            "memory.kv: expected dtype torch.float32, got torch.bfloat16",
            {"memory": EMPTY.map(torch.Tensor.bfloat16)},
        ),
        (ValueError, r"read_weight: expected shape \[4, 8\], got \[4\]", {"update": "residual"}),
        (
            ValueError,
            "memory: does not belong to update 'residual'",
            {"update": "residual", "read_weight": Q[0, :, 0], "memory": EMPTY},
        ),
        (ValueError, "memory_gates: not with update 'linear'", {"memory_gates": K[..., :2]}),
        (ConfigError, "got 'flash', which needs a GPU; on cpu it takes auto", {"backend": "flash"}),
        (
            ConfigError,
            "attention_backend: got 'best', takes auto, flash, sdpa",
            {"backend": "best"},
        ),
    ],
)
def test_bad_input_is_named(error, message, change):
    arguments = {"q": Q, "k": K, "v": V, "read_weight": READ_WEIGHT, "segment_length": 4} | change
    with pytest.raises(error, match=message):
        infini_attention(**arguments)


@EACH
@pytest.mark.parametrize("threads", [2, 3])
def test_a_pass_on_several_threads_repeats_its_bits(update, threads):
    q, k, v, read_weight, keys, _ = draw(2, 4, 2, 512, 32, dtype=torch.float32)

    def gradients():
        leaves = [
            x.clone().requires_grad_() for x in (q, k, v, weighed(update, q, read_weight), keys)
        ]
        *inputs, memory_keys = leaves
        out, _ = infini_attention(
            *inputs, segment_length=64, update=update, memory_keys=memory_keys
        )
        out.square().sum().backward()
        return [out, *(leaf.grad for leaf in leaves)]

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for first, again in zip(gradients(), gradients(), strict=True):
            assert torch.equal(first, again)
    finally:
        torch.set_num_threads(before)
