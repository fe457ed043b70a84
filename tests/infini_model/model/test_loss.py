"""The chunked loss against PyTorch's cross entropy on the whole logits."""

from functools import partial

import pytest
import torch
from hypothesis import given as given_
from hypothesis import settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from infini_model.model import loss as module
from infini_model.model.loss import summed_loss, token_losses

ROWS, WIDTH, VOCABULARY = 23, 6, 17
CHUNKS = pytest.mark.parametrize("rows_at_once", [1, 5, 8, ROWS])


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


def in_chunks(function, rows):
    return partial(function, logits_at_once=rows * VOCABULARY)


@CHUNKS
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_equals_the_loss_of_the_whole(rows_at_once, masked, scale):
    """Also where logits differ so much that probabilities underflow, and for a scaled loss."""
    chunked = in_chunks(summed_loss, rows_at_once)
    given = inputs(masked=masked, scale=scale)
    ours = loss_and_gradients(chunked, *given, factor=-0.37)
    theirs = loss_and_gradients(whole, *given, factor=-0.37)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    hidden, weight, targets = given
    each = functional.cross_entropy(functional.linear(hidden, weight), targets, reduction="none")
    by_token = in_chunks(token_losses, rows_at_once)(*given)
    torch.testing.assert_close(by_token, each, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(chunked(*given), theirs[0], rtol=1e-10, atol=1e-10)


def test_gradients_are_those_of_the_loss():
    hidden, weight, targets = inputs()
    loss = partial(in_chunks(summed_loss, 5), targets=targets)
    assert torch.autograd.gradcheck(loss, (hidden, weight), check_undefined_grad=False)


@CHUNKS
def test_all_targets_masked_give_zero_loss_and_gradients(rows_at_once):
    hidden, weight, targets = inputs()
    chunked = in_chunks(summed_loss, rows_at_once)
    results = loss_and_gradients(chunked, hidden, weight, torch.full_like(targets, -100))
    assert all(bool((x == 0).all()) for x in results)


def test_masked_rows_reach_no_gradient_however_large():
    hidden, weight, targets = inputs(torch.float32)
    with torch.no_grad():
        hidden[3] = 1e30
    ours = loss_and_gradients(in_chunks(summed_loss, 5), hidden, weight, targets)
    assert all(bool(x.isfinite().all()) for x in ours)
    assert bool((ours[1][3] == 0).all())


@CHUNKS
@pytest.mark.parametrize("autocast", [True, False])
def test_bf16_under_autocast_and_as_dtype(rows_at_once, autocast):
    """At most twice as far from the exact gradients as the loss of the whole."""
    exact = inputs(rows=20 * ROWS)
    dtype = torch.float32 if autocast else torch.bfloat16
    given = [x.detach().to(dtype).requires_grad_() for x in exact[:2]] + [exact[2]]
    errors = []
    for function in (in_chunks(summed_loss, rows_at_once), whole):
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


@pytest.mark.parametrize("autocast", [True, False])
def test_chunks_of_whole_tiles_equal_the_whole(monkeypatch, autocast):
    """Three chunks, the last one shorter, and in 16 bits the weight's gradient in several parts."""
    monkeypatch.setattr(module, "PRODUCTS_AT_ONCE", 5 * WIDTH)
    dtype = torch.float32 if autocast else torch.float64
    given = inputs(dtype, rows=2 * module.TILE + 9)
    results = []
    for rows in (module.TILE + 7, len(given[2])):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            results.append(loss_and_gradients(in_chunks(summed_loss, rows), *given))
    bound = 1e-2 if autocast else 1e-10
    torch.testing.assert_close(*results, rtol=bound, atol=bound)


@given_(st.integers(1, 10_000), st.integers(1, 2000), st.integers(1, 1 << 20))
@settings(max_examples=200, derandomize=True)
def test_chunks_are_as_few_as_fit_and_whole_tiles(rows, vocabulary, at_once):
    found = module._rows_at_once(rows, vocabulary, at_once)
    longest = max(1, at_once // vocabulary)
    assert 1 <= found <= longest
    if longest < module.TILE:
        assert -(-rows // found) == -(-rows // longest)
        return
    assert found % module.TILE == 0
    fewest = -(-rows // (longest // module.TILE * module.TILE))
    assert -(-rows // found) == fewest


def test_a_chunk_is_as_large_as_the_weight(monkeypatch):
    """Each chunk reads and writes the gradient of the whole weight: there must not be many."""
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 2 * VOCABULARY)
    widest = []
    softmax = torch.log_softmax
    monkeypatch.setattr(
        torch, "log_softmax", lambda x, **named: widest.append(len(x)) or softmax(x, **named)
    )
    hidden, weight, targets = inputs()
    summed_loss(hidden, weight, targets)
    assert max(widest) == WIDTH


# What waits for a GPU, or copies to one from memory that is not page-locked, which waits as well.
WAITING = {"aten::_local_scalar_dense", "aten::item", "aten::lift_fresh", "aten::nonzero"}


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("excluded", [None, 3])
def test_nothing_waits_for_the_device(autocast, excluded):
    hidden, weight, targets = inputs(torch.float32)
    targets[targets == excluded] = -100
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.tensor([3]).item()
    assert {event.name for event in profiler.events()} & WAITING
    factors = torch.rand(ROWS)
    for row_weights in (None, factors):
        with (
            profile(activities=[ProfilerActivity.CPU]) as profiler,
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            loss = in_chunks(summed_loss, 5)(
                hidden, weight, targets, row_weights=row_weights, excluded=excluded
            )
            torch.autograd.grad(loss, (hidden, weight))
        names = {event.name for event in profiler.events()}
        assert "aten::log_softmax" in names or "aten::_log_softmax" in names
        assert not names & WAITING


def test_a_target_outside_the_vocabulary_is_an_error():
    hidden, weight, targets = inputs()
    for wrong in (VOCABULARY, -5):
        targets[1] = wrong
        with pytest.raises((RuntimeError, IndexError)):
            summed_loss(hidden, weight, targets)
        with torch.no_grad(), pytest.raises((RuntimeError, IndexError)):
            summed_loss(hidden, weight, targets)


def test_a_second_derivative_is_refused():
    hidden, weight, targets = inputs()
    loss = summed_loss(hidden, weight, targets)
    first = torch.autograd.grad(loss, hidden, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once, not twice"):
        torch.autograd.grad(first.square().sum(), hidden)


@pytest.mark.parametrize("autocast", [True, False])
def test_compiles_without_a_graph_break(autocast):
    chunked, given = in_chunks(summed_loss, 5), inputs(torch.float32)
    torch.compiler.reset()
    compiled = torch.compile(chunked, backend="aot_eager", fullgraph=True)
    results = []
    for function in (compiled, chunked):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = function(*given)
        results.append((loss, *torch.autograd.grad(loss * 0.3, given[:2])))
    torch.testing.assert_close(*results, rtol=0, atol=0)
