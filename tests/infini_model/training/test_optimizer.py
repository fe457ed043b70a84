import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model

from infini_model.config import TrainingConfig
from infini_model.model.memory import MEMORY_PARAMETERS
from infini_model.training.optimizer import learning_rate_share, make_optimizer, set_learning_rate


def test_every_parameter_has_one_rate_and_only_matrices_decay():
    model = tiny_model()
    config = TrainingConfig(
        weight_decay=0.3, learning_rate=1e-3, memory_learning_rate=1e-2, warmup_steps=4
    )
    optimizer = make_optimizer(model, config)
    names = {id(p): name for name, p in model.named_parameters()}
    grouped = {g["name"]: [names[id(p)] for p in g["params"]] for g in optimizer.param_groups}
    assert sorted(itertools.chain(*grouped.values())) == sorted(names.values())
    assert all(name.endswith(MEMORY_PARAMETERS) for name in grouped["memory"])
    # The weight, both gates and the key shift of two layers.
    assert len(grouped["memory"]) == 8
    assert "lm_head.weight" in grouped["decay"]
    assert "model.layers.0.mlp.gate_proj.weight" in grouped["decay"]
    assert "model.embed_tokens.weight" in grouped["no decay"]
    assert "model.norm.weight" in grouped["no decay"]
    decays = {g["name"]: g["weight_decay"] for g in optimizer.param_groups}
    assert decays == {"decay": 0.3, "no decay": 0.0, "memory": 0.0}
    assert set_learning_rate(optimizer, 2, config) == pytest.approx(5e-4)
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert rates == pytest.approx({"decay": 5e-4, "no decay": 5e-4, "memory": 5e-3})


@given(
    warmup=st.integers(0, 30),
    more=st.integers(1, 100),
    ratio=st.floats(0.0, 1.0),
)
def test_the_rate_rises_to_its_peak_and_falls_to_its_floor(warmup, more, ratio):
    config = TrainingConfig(
        max_steps=warmup + more, warmup_steps=warmup, min_learning_rate_ratio=ratio
    )
    shares = [learning_rate_share(step, config) for step in range(1, config.max_steps + 1)]
    rise, fall = shares[:warmup], shares[warmup:]
    assert rise == sorted(rise)
    assert fall == sorted(fall, reverse=True)
    assert all(0.0 <= share <= 1.0 + 1e-12 for share in shares)
    assert shares[-1] == pytest.approx(ratio)
    if warmup:
        assert shares[warmup - 1] == 1.0
