import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model

from infini_model.config import TrainingConfig
from infini_model.model.memory import MEMORY_PARAMETERS
from infini_model.training.optimizer import learning_rate_share, make_optimizer, set_learning_rate


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_parameter_has_one_rate_and_only_matrices_decay(optimizer):
    model = tiny_model()
    config = TrainingConfig(
        optimizer=optimizer,
        weight_decay=0.3,
        learning_rate=1e-3,
        memory_learning_rate=1e-2,
        warmup_steps=4,
    )
    optimizer = make_optimizer(model, config)
    names = {id(p): name for name, p in model.named_parameters()}
    grouped = {g["name"]: [names[id(p)] for p in g["params"]] for g in optimizer.param_groups}
    assert sorted(itertools.chain(*grouped.values())) == sorted(names.values())
    assert all(name.endswith(MEMORY_PARAMETERS) for name in grouped["memory"])
    # The weight, both gates and the key shift of two layers.
    assert len(grouped["memory"]) == 8
    assert "lm_head.weight" in grouped["decay"]
    assert "model.layers.0.mlp.gate_proj.weight" in grouped["layers"]
    assert "model.embed_tokens.weight" in grouped["no decay"]
    assert "model.norm.weight" in grouped["no decay"]
    decays = {g["name"]: g["weight_decay"] for g in optimizer.param_groups}
    assert decays == {"layers": 0.3, "decay": 0.3, "no decay": 0.0, "memory": 0.0}
    assert set_learning_rate(optimizer, 2, config) == pytest.approx(5e-4)
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    expected = {"layers": 5e-4, "decay": 5e-4, "no decay": 5e-4, "memory": 5e-3}
    assert rates == pytest.approx(expected)


SCHEDULES = ("cosine", "linear", "wsd", "constant")


@given(
    schedule=st.sampled_from(SCHEDULES),
    warmup=st.integers(0, 30),
    stable=st.integers(0, 60),
    decay=st.none() | st.integers(1, 60),
    ratio=st.floats(0.0, 1.0),
)
def test_the_rate_rises_to_its_peak_stays_there_and_falls_to_its_floor(
    schedule, warmup, stable, decay, ratio
):
    decay = None if schedule == "constant" else decay
    config = TrainingConfig(
        schedule=schedule,
        max_steps=warmup + stable + (decay or 1),
        warmup_steps=warmup,
        decay_steps=decay,
        min_learning_rate_ratio=ratio,
    )
    shares = [learning_rate_share(step, config) for step in range(1, config.max_steps + 1)]
    rise, rest = shares[:warmup], shares[warmup:]
    assert rise == sorted(rise)
    assert rest == sorted(rest, reverse=True)
    assert all(0.0 <= share <= 1.0 + 1e-12 for share in shares)
    if warmup:
        assert shares[warmup - 1] == 1.0
    if decay is not None:
        assert rest[:stable] == [1.0] * stable
    assert shares[-1] == pytest.approx(1.0 if schedule == "constant" else ratio)


def test_schedules_are_those_of_pytorch():
    """A warm-up of 5 steps, and 20 more; step 1 here is a scheduler's epoch 0."""
    from torch.optim import SGD
    from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

    scheduler = {
        "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 20, eta_min=0.1),
        "linear": lambda optimizer: LinearLR(optimizer, 1.0, 0.1, total_iters=20),
    }
    for schedule, make in scheduler.items():
        optimizer = SGD([torch.zeros(1)], lr=1.0)
        theirs = make(optimizer)
        config = TrainingConfig(schedule=schedule, max_steps=25, warmup_steps=5)
        for step in range(5, 26):
            assert learning_rate_share(step, config) == pytest.approx(
                optimizer.param_groups[0]["lr"]
            )
            optimizer.step()
            theirs.step()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"schedule": "constant", "decay_steps": 3}, "decay_steps needs another schedule"),
        ({"max_steps": 9, "decay_steps": 5, "warmup_steps": 5}, "warmup_steps 5 and decay_steps 5"),
    ],
)
def test_a_decay_that_cannot_be_is_refused(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        TrainingConfig.model_validate(change)
