"""An objective is a class in one file: one with randomness of its own trains like the built-in."""

import pytest
import torch
from curves import curve

from infini_model.objectives.causal import CausalLM
from infini_model.training import parts
from infini_model.training.loop import train

HIDDEN = 0


class Cloze:
    """Next-token prediction with masked inputs, drawn from (seed, key of the window)."""

    def __init__(self, seed):
        self.seed, self.causal = seed, CausalLM()

    def inputs(self, batch):
        inputs = self.causal.inputs(batch)
        width = inputs.input_ids.size(1)
        generators = (torch.Generator().manual_seed(self.seed + key) for key in batch.keys.tolist())
        hidden = torch.stack([torch.rand(width, generator=each) < 0.3 for each in generators])
        return inputs._replace(input_ids=inputs.input_ids.masked_fill(hidden, HIDDEN))

    def loss(self, model, inputs, reduction):
        return 0.5 * self.causal.loss(model, inputs, reduction)


def test_a_random_objective_trains_the_same_in_batches_of_any_size(
    dataset, make_config, tmp_path, monkeypatch
):
    """Masks that depend on the windows alone, as those need that resume to the same bits."""
    monkeypatch.setattr(parts, "make_objective", lambda config: Cloze(config.run.seed))
    steps = {"max_steps": 4, "batch_size": 8}
    train(make_config(training=steps), dataset, tmp_path / "whole")
    divided = steps | {"batch_size": 2, "gradient_accumulation_steps": 4}
    train(make_config(training=divided), dataset, tmp_path / "divided")
    for name in ("train/loss", "validation/loss"):
        whole, other = (curve(tmp_path / run, name) for run in ("whole", "divided"))
        assert whole
        assert other == pytest.approx(whole, abs=2e-5)
