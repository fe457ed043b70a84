"""A third-party objective with its own randomness trains and resumes like the built-in one."""

import pytest
import torch
from curves import curve, repeatable, weights
from stopping import StopAfter
from trainings import on_two_ranks

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


def _train_cloze(config, dataset, run_dir):
    parts.make_objective = lambda config: Cloze(config.run.seed)
    train(config, dataset, run_dir)


def test_a_random_objective_resumes_to_the_same_bits(dataset, make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "make_objective", lambda config: Cloze(config.run.seed))
    config = make_config()
    train(config, dataset, tmp_path / "whole")
    assert train(config, dataset, tmp_path / "parts", [StopAfter(6)]).stopped_by
    train(config, dataset, tmp_path / "parts")
    assert repeatable(tmp_path / "parts") == repeatable(tmp_path / "whole")
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    # The masks depend on the windows, not on the batch size.
    smaller = make_config(training={"batch_size": 2, "gradient_accumulation_steps": 4})
    train(smaller, dataset, tmp_path / "smaller")
    pair = make_config(training={"batch_size": 4})
    on_two_ranks(_train_cloze, pair, dataset, tmp_path / "pair")
    for name in ("train/loss", "validation/loss"):
        whole, *others = (curve(tmp_path / run, name) for run in ("whole", "smaller", "pair"))
        for other in others:
            assert other == pytest.approx(whole, abs=2e-5)
