"""The chunked loss against PyTorch's cross entropy on the whole logits."""

import pytest
import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from infini_model.model import loss as module
from infini_model.model.loss import fused_linear_cross_entropy, token_losses

ROWS, WIDTH, VOCABULARY = 23, 6, 17
CHUNKS = pytest.mark.parametrize("rows_at_once", [1, 5, ROWS])
AUTOCAST = pytest.mark.parametrize("autocast", [False, True])


def inputs(dtype=torch.float64, masked=True, scale=1.0, rows=ROWS):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, WIDTH, generator=draw, dtype=dtype) * scale
    weight = torch.randn(VOCABULARY, WIDTH, generator=draw, dtype=dtype)
    targets = torch.randint(VOCABULARY, (rows,), generator=draw)
    if masked:
        targets[[0, 3, 4, 5, 6, 7, 22]] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def whole(hidden, weight, targets):
    logits = functional.linear(hidden, weight)
    exact = torch.promote_types(logits.dtype, torch.float32)
    return functional.cross_entropy(logits.to(exact), targets, reduction="sum")


def loss_and_gradients(function, hidden, weight, targets, factor=1.0):
    loss = function(hidden, weight, targets)
    return loss, *torch.autograd.grad(loss * factor, (hidden, weight))


@pytest.fixture
def in_chunks(monkeypatch):
    """Makes the loss compute so many rows at once."""
    return lambda rows: monkeypatch.setattr(module, "_rows_at_once", lambda *_: rows)


@CHUNKS
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_equals_the_loss_of_the_whole(in_chunks, rows_at_once, scale):
    """Also where logits differ so much that probabilities underflow, and for a scaled loss."""
    chunked = fused_linear_cross_entropy
    in_chunks(rows_at_once)
    for masked in (False, True):
        given = inputs(masked=masked, scale=scale)
        ours, theirs = (loss_and_gradients(f, *given, factor=-0.37) for f in (chunked, whole))
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        hidden, weight, targets = given
        logits = functional.linear(hidden, weight)
        each = functional.cross_entropy(logits, targets, reduction="none")
        torch.testing.assert_close(token_losses(*given), each, rtol=1e-10, atol=1e-10)
    nothing = loss_and_gradients(chunked, hidden, weight, torch.full_like(targets, -100))
    assert not any(x.any() for x in nothing)


@CHUNKS
@AUTOCAST
def test_bf16_under_autocast_and_as_dtype(in_chunks, rows_at_once, autocast):
    """At most twice as far from the exact gradients as the loss of the whole."""
    in_chunks(rows_at_once)
    exact = inputs(rows=20 * ROWS)
    dtype = torch.float32 if autocast else torch.bfloat16
    given = [x.detach().to(dtype).requires_grad_() for x in exact[:2]] + [exact[2]]
    errors = []
    for function in (fused_linear_cross_entropy, whole):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = function(*given)
        results = loss, *torch.autograd.grad(loss, given[:2])
        assert loss.dtype == torch.float32
        assert [x.dtype for x in results[1:]] == [dtype] * 2
        references = loss_and_gradients(whole, *exact)
        errors.append([(a - b).norm() for a, b in zip(results, references, strict=True)])
    for ours, theirs, reference in zip(*errors, references, strict=True):
        assert ours <= 2 * theirs + 1e-3 * reference.norm()
    assert errors[0][1] > 1e-4 * references[1].norm()  # the products were in bf16


def test_the_gradient_of_a_weight_in_fp16_does_not_overflow():
    """Summed in one product it would end at the largest fp16 number, 65,504."""
    rows = 1 << 17
    hidden, weight = (torch.ones(n, 8, requires_grad=True) for n in (rows, 4))
    with torch.autocast("cpu", torch.float16):
        loss = fused_linear_cross_entropy(hidden, weight, torch.zeros(rows, dtype=torch.int64))
    (dweight,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(dweight[:, 0] / rows, torch.tensor([-0.75, 0.25, 0.25, 0.25]))


@AUTOCAST
def test_chunks_of_whole_tiles_equal_the_whole(monkeypatch, autocast):
    """Three chunks, the last one shorter, and in 16 bits the weight's gradient in several parts."""
    monkeypatch.setattr(module, "PRODUCTS_AT_ONCE", 5 * WIDTH)
    dtype = torch.float32 if autocast else torch.float64
    given = inputs(dtype, rows=2 * module.TILE + 9)
    results = []
    for rows in (module.TILE + 7, len(given[2])):
        monkeypatch.setattr(module, "LOGITS_AT_ONCE", rows * VOCABULARY)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            results.append(loss_and_gradients(fused_linear_cross_entropy, *given))
    bound = 1e-2 if autocast else 1e-10
    torch.testing.assert_close(*results, rtol=bound, atol=bound)


@AUTOCAST
def test_the_logits_are_never_held_whole(monkeypatch, autocast):
    rows, vocabulary = 512, 997
    hidden = torch.randn(rows, WIDTH, requires_grad=True)
    weight = torch.randn(vocabulary, WIDTH, requires_grad=True)
    targets, whole_bytes = torch.arange(rows), rows * vocabulary * 4
    largest, kept = [], []

    def keep(x):
        kept.append(x.untyped_storage().nbytes())
        return x

    for rows_at_once in (rows, 16):
        monkeypatch.setattr(module, "LOGITS_AT_ONCE", rows_at_once * vocabulary)
        with (
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
        ):
            fused_linear_cross_entropy(hidden, weight, targets).backward()
        largest.append(max(event.self_cpu_memory_usage for event in profiler.events()))
    assert largest[0] == whole_bytes
    assert largest[1] < whole_bytes / 10
    assert max(kept) < whole_bytes / 10


def test_a_target_outside_the_vocabulary_is_an_error():
    hidden, weight, targets = inputs()
    for wrong in (VOCABULARY, -5):
        targets[1] = wrong
        with pytest.raises((RuntimeError, IndexError)):
            fused_linear_cross_entropy(hidden, weight, targets)
