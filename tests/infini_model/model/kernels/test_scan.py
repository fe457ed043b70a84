"""The running sums over segments, and their gradients."""

import pytest
import torch

from infini_model.model.kernels.scan import exclusive_scan


@pytest.mark.parametrize("reverse", [False, True])
def test_the_gradients_of_a_scan_that_decays(reverse):
    added, first = torch.randn(2, 4, 2, 3).double(), torch.randn(2, 2, 3).double()
    reset, kept = torch.rand(2, 5) < 0.3, torch.rand(2, 4, 2).double()
    inputs = [x.requires_grad_() for x in (added, first, kept)]

    def scan(added, first, kept):
        return exclusive_scan(added, first, reset, kept, reverse=reverse)

    assert torch.autograd.gradcheck(scan, inputs)
    # Nothing gets past a reset, in this direction or in the other.
    reset[:], reset[:, 2] = False, True
    added.detach()[:, slice(2, None) if reverse else slice(2)] = torch.nan
    states = scan(*inputs)
    after = states[:, :3] if reverse else states[:, 2:]
    gradients = torch.autograd.grad(after.sum(), [first, kept])
    assert all(x.isfinite().all() for x in (after, *gradients))


def test_it_is_an_operator_with_and_without_decay():
    """But for tracing, which the tests of compiled layers do."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    added, first, kept = (
        torch.rand(2, *shape, dtype=torch.float64, requires_grad=True)
        for shape in ((3, 2, 2), (2, 2), (3, 2))
    )
    reset = torch.tensor([[False, True, False, False], [False, False, False, True]])
    for arguments in ((added, first, reset), (added, first, reset, kept)):
        torch.library.opcheck(exclusive_scan, arguments, test_utils=checks)
