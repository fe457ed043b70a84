"""Muon beside PyTorch's, on one process. On several, and resumed: `test_same_training.py`."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model

from infini_model.config import TrainingConfig
from infini_model.training.optimizer import make_optimizer, orthogonalize

CONFIG = TrainingConfig(optimizer="muon", learning_rate=1e-2, weight_decay=0.1)
TAKEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def model():
    return tiny_model().float()


def give_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def state_of(model, optimizer):
    """Copy the weights, and the state of each."""
    moments = [dict(optimizer.state[parameter]) for parameter in model.parameters()]
    return copy.deepcopy(([p.detach() for p in model.parameters()], moments))


def test_the_steps_are_those_of_pytorch(model):
    """Up to the rounding of bfloat16, in which PyTorch divides by the norm at another moment."""
    peer = copy.deepcopy(model)
    matrices, others = [], []
    for name, parameter in peer.named_parameters():
        (matrices if name.removesuffix(".weight").endswith(TAKEN) else others).append(parameter)
    assert len(matrices) == 2 * len(TAKEN)
    ours = make_optimizer(model, CONFIG)
    theirs = torch.optim.Muon(matrices, 1e-2, 0.1, adjust_lr_fn="match_rms_adamw")
    adamw = make_optimizer(peer, TrainingConfig(learning_rate=1e-2, weight_decay=0.1))
    for seed in range(3):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for each in (model, peer):
            give_gradients(each, seed)
        ours.step()
        theirs.step()
        for parameter in matrices:
            parameter.grad = None
        adamw.step()
        for old, mine, other in zip(before, model.parameters(), peer.parameters(), strict=True):
            rounding = 0.02 * (other - old).abs().max() if any(other is m for m in matrices) else 0
            assert (mine - other).abs().max() <= rounding
            with torch.no_grad():
                other.copy_(mine)


@given(rows=st.integers(2, 40), columns=st.integers(2, 40), seed=st.integers(0, 99))
def test_an_update_is_orthogonal_whatever_its_shape(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    bases = torch.randn(3, rows, columns, generator=generator)
    left, _, right = torch.linalg.svd(bases, full_matrices=False)
    values = torch.linspace(0.1, 1.0, min(rows, columns))
    found = orthogonalize((left * values) @ right)
    assert found.shape == bases.shape
    singular = torch.linalg.svdvals(found)
    assert singular.min() > 0.6
    assert singular.max() < 1.3
    # It points where the momentum does.
    torch.testing.assert_close(
        (left.mT @ found @ right.mT).diagonal(dim1=-2, dim2=-1).sign(), torch.ones(3, len(values))
    )


def test_no_step_is_taken_where_gradients_are_not_finite(model):
    optimizer = make_optimizer(model, CONFIG)
    give_gradients(model, 0)
    optimizer.step()
    before = state_of(model, optimizer)
    for parameter in model.parameters():
        parameter.grad.fill_(torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    torch.testing.assert_close(state_of(model, optimizer), before, rtol=0, atol=0)
    optimizer.found_inf = torch.zeros(())
    give_gradients(model, 1)
    optimizer.step()
    weights, _ = state_of(model, optimizer)
    assert all(each.isfinite().all() for each in weights)
    assert not any(map(torch.equal, weights, before[0]))


def test_adapters_are_refused():
    with pytest.raises(ValueError, match="optimizer=muon does not support lora"):
        TrainingConfig.model_validate({"optimizer": "muon", "lora": {}})
