"""An objective is a class in one file: one with randomness of its own trains like the built-in."""

import pytest
import torch
from curves import curve

from infini_model.objectives.causal import CausalLM
from infini_model.training import setup
from infini_model.training.train import train


class Cloze:
    """Next-token prediction with masked inputs, drawn from (seed, key of the window)."""

    def __init__(self, seed):
        self.seed, self.causal = seed, CausalLM()

    def inputs(self, batch):
        inputs = self.causal.inputs(batch)
        width = inputs.input_ids.size(1)
        generators = (
            torch.Generator().manual_seed(self.seed + key) for key in batch.noise_keys.tolist()
        )
        hidden = torch.stack([torch.rand(width, generator=each) < 0.3 for each in generators])
        return inputs._replace(input_ids=inputs.input_ids.masked_fill(hidden, 0))

    def loss(self, model, inputs, reduction):
        return 0.5 * self.causal.loss(model, inputs, reduction)


def test_a_random_objective_trains_the_same_in_batches_of_any_size(
    dataset, make_config, tmp_path, monkeypatch
):
    """Masks that depend on the windows alone, as those need that resume to the same bits."""
    monkeypatch.setattr(setup, "make_objective", lambda config: Cloze(config.run.seed))
    # Micro-batches then have different numbers of targets.
    packing = {"mode": "document", "remainder": "pad"}
    for name, size, accumulation in (("whole", 8, 1), ("parts", 2, 4)):
        sizes = {"batch_size": size, "gradient_accumulation_steps": accumulation}
        config = make_config(training=sizes | {"max_steps": 4}, packing=packing)
        train(config, dataset, tmp_path / name)
    for name, rounding in (("train/loss", 0), ("validation/loss", 0), ("train/grad_norm", 1e-3)):
        whole = curve(tmp_path / "whole", name)
        assert whole
        assert curve(tmp_path / "parts", name) == pytest.approx(whole, rel=rounding, abs=2e-5)
