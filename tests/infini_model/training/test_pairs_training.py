"""Trainings on prompts and answers, from JSON lines to a model."""

import logging

import pytest
from curves import curve, repeatable, weights
from stopping import StopAfter
from trainings import on_two_ranks

from infini_model.runtime.errors import ConfigError
from infini_model.training.loop import train


@pytest.mark.parametrize("objective", ["causal", "masked_diffusion"])
def test_a_training_learns_answers_and_resumes_to_the_same_bits(
    pairs, make_pairs_config, tmp_path, caplog, objective
):
    config = make_pairs_config(objective)
    with caplog.at_level(logging.WARNING):
        train(config, pairs, tmp_path / "whole")
    said = [record.getMessage() for record in caplog.records]
    assert sum("packing.context_length=64 is too short for 1 prompts" in each for each in said) == 1
    losses = curve(tmp_path / "whole", "validation/loss")
    assert losses[12] < losses[0] - 0.5
    assert train(config, pairs, tmp_path / "parts", [StopAfter(6)]).stopped_by
    train(config, pairs, tmp_path / "parts")
    assert repeatable(tmp_path / "parts") == repeatable(tmp_path / "whole")
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


@pytest.mark.parametrize(
    "objective", [pytest.param("causal", marks=pytest.mark.story), "masked_diffusion"]
)
def test_the_loss_does_not_depend_on_how_the_batch_is_divided(
    pairs, make_pairs_config, tmp_path, objective
):
    train(make_pairs_config(objective), pairs, tmp_path / "whole")
    smaller = make_pairs_config(objective, batch_size=2, gradient_accumulation_steps=4)
    train(smaller, pairs, tmp_path / "smaller")
    on_two_ranks(train, make_pairs_config(objective, batch_size=4), pairs, tmp_path / "pair")
    for name in ("train/loss", "validation/loss", "test/loss"):
        whole, *others = (curve(tmp_path / run, name) for run in ("whole", "smaller", "pair"))
        for other in others:
            assert other == pytest.approx(whole, abs=2e-5)


def test_another_packing_is_refused_before_the_first_step(pairs, make_config, tmp_path):
    with pytest.raises(ConfigError, match=r"packing\.mode: .* need packing\.mode=document and"):
        train(make_config(), pairs, tmp_path / "run")
