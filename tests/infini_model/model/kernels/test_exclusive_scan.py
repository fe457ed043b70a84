"""The scan over segments against a plain loop, and how often it lets the memory's states be read.

What a GPU pays for the states is their traffic: a few kernels that do little else. It is counted
here on the CPU, from the arguments and results of every operator.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infini_model.model.attention import infini_attention
from infini_model.model.kernels.exclusive_scan import exclusive_scan


def draw(rows, segments, *shape):
    generator = torch.Generator().manual_seed(segments)
    added = torch.randn(rows, segments, *shape, generator=generator, dtype=torch.float64)
    first = torch.randn(rows, *shape, generator=generator, dtype=torch.float64)
    reset = torch.rand(rows, segments + 1, generator=generator) < 0.3
    return added.requires_grad_(), first.requires_grad_(), reset


def loop(added, first, reset):
    """The states before each segment, and that after the last."""
    states = []
    for border in range(added.size(1) + 1):
        state = states[-1] + added[:, border - 1] if border else first
        states.append(torch.where(reset[:, border, None, None], 0.0, state))
    return torch.stack(states[:-1], dim=1), states[-1]


@pytest.mark.parametrize("segments", [1, 2, 7])
def test_equals_a_loop_with_all_gradients(segments):
    added, first, reset = draw(3, segments, 2, 5)
    weights = torch.randn(3, segments, 2, 5).double(), torch.randn(3, 2, 5).double()
    both = (
        [*out, *torch.autograd.grad(out, (added, first), weights)]
        for out in (exclusive_scan(added, first, reset), loop(added, first, reset))
    )
    for ours, theirs in zip(*both, strict=True):
        assert torch.equal(ours, theirs)
    never = torch.zeros_like(reset)
    for ours, theirs in zip(
        exclusive_scan(added, first, None), loop(added, first, never), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_from_the_last_it_is_the_scan_of_the_reversed_segments():
    added, first, reset = draw(2, 5, 3)
    states, end = exclusive_scan(added, first, reset, from_last=True)
    reversed_states, reversed_end = exclusive_scan(added.flip(1), first, reset.flip(1))
    assert torch.equal(states, reversed_states.flip(1))
    assert torch.equal(end, reversed_end)


def test_without_segments_the_first_state_is_the_last():
    added, first, reset = draw(2, 0, 3)
    states, end = exclusive_scan(added, first, reset)
    assert states.shape == (2, 0, 3)
    assert torch.equal(end, torch.where(reset, 0.0, first))
    (dfirst,) = torch.autograd.grad(end.sum(), first)
    assert torch.equal(dfirst, (~reset).double().expand_as(first))


def test_not_even_nan_gets_past_a_reset_in_either_direction():
    added, first, reset = draw(1, 4, 3)
    added.data[:, 1] = torch.nan
    reset[:] = torch.tensor([False, False, True, False, False])
    states, end = exclusive_scan(added, first, reset)
    assert states[:, :2].isfinite().all()
    assert states[:, 2:].isfinite().all()
    assert end.isfinite().all()
    grads = torch.zeros_like(states)
    grads[:, 2] = torch.nan
    dadded, dfirst = torch.autograd.grad(states, (added, first), grads)
    assert dfirst.isfinite().all()
    assert dadded[:, :2].isfinite().all()


@pytest.mark.parametrize("from_last", [False, True])
def test_passes_opcheck_and_gradcheck(from_last):
    added, first, reset = draw(2, 3, 2, 2)
    for resets in (reset, None):
        arguments = added, first, resets
        torch.library.opcheck(exclusive_scan, arguments, {"from_last": from_last})
        assert torch.autograd.gradcheck(
            lambda *x, resets=resets: exclusive_scan(*x, resets, from_last=from_last), arguments[:2]
        )


class StateTraffic(TorchDispatchMode):
    """Counts the numbers of memory states that operators read and write, views excepted."""

    def __init__(self, head_dim):
        super().__init__()
        self.head_dim, self.numbers = head_dim, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if not operator.is_view and "empty" not in operator.name():
            for x in tree_leaves((args, kwargs, result)):
                if isinstance(x, torch.Tensor) and x.shape[-2:] == (self.head_dim,) * 2:
                    self.numbers += x.numel()
        return result


def passes(segments, *, reset):
    """How often all states are read or written in a forward and backward pass over two rows."""
    rows, heads, length, width = 2, 2, 3, 16
    # As a projection stores them: [B, T, H, D].
    q, k, v = (
        torch.randn(rows, segments * length, heads, width).transpose(1, 2).requires_grad_()
        for _ in range(3)
    )
    gate = torch.zeros(heads, requires_grad=True)
    starts = torch.rand(rows, segments) < 0.3 if reset else None
    with StateTraffic(width) as traffic:
        out, _ = infini_attention(q, k, v, gate, segment_length=length, reset=starts)
        torch.autograd.grad(out, (q, k, v, gate), torch.ones_like(out))
    return traffic.numbers / (rows * segments * heads * width * width)


@pytest.mark.parametrize("segments", [2, 4, 16, 64])
def test_nine_passes_over_the_states_whatever_their_number_and_resets(segments):
    """Forward: the sums are written, scanned (read and written), and read; backward: the reads
    give a gradient from a state, which is scanned (read and written) and read by the sums.
    """
    plain, aligned = (passes(segments, reset=reset) for reset in (False, True))
    assert aligned == plain
    # The state before the first segment and that after the last, and their gradients.
    ends = 6
    assert plain <= 9 + ends / segments
