"""Causal language modelling: next-token losses, summed without materializing all logits."""

import numpy as np
import pytest
import torch
from tiny_models import tiny_config
from torch.nn import functional

from infini_model.data.loading.windows import Batch
from infini_model.model.llama import InfiniLlama
from infini_model.model.precision import PRECISIONS
from infini_model.objectives.causal import CausalLM, GPUDataCollatorForCLM
from infini_model.objectives.objective import LossModule
from infini_model.objectives.scoring import Scorer

VOCABULARY, SEGMENT = 17, 4


def make_batch():
    """Two windows of two one-segment rows; the second window starts with a document."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (2, 2, SEGMENT + 1), generator=generator)
    valid, reset = torch.tensor([[4, 2], [4, 4]]), torch.tensor([[True, False], [True, True]])
    return Batch(tokens, valid, reset, torch.arange(2))


@pytest.fixture
def module():
    torch.manual_seed(0)
    return LossModule(InfiniLlama(tiny_config(vocab_size=VOCABULARY)), CausalLM())


def losses_by_logits(model, inputs):
    logits = model(inputs.input_ids, reset=inputs.reset).logits
    return functional.cross_entropy(logits.mT, inputs.labels, reduction="none")


def test_each_position_predicts_the_next_token_of_its_row():
    batch = make_batch()
    inputs = CausalLM().inputs(batch)
    assert torch.equal(inputs.input_ids, batch.tokens[:, :, :-1].reshape(2, 8))
    assert torch.equal(inputs.labels[1], batch.tokens[1, :, 1:].reshape(8))
    assert inputs.labels[0].tolist()[6:] == [-100, -100]
    assert inputs.counted.sum() == 14


def test_the_loss_and_its_gradients_are_those_of_the_logits(module):
    inputs = CausalLM().inputs(make_batch())
    expected = losses_by_logits(module.model, inputs)
    assert torch.allclose(module(inputs, "none"), expected, atol=1e-5)
    assert not module(inputs, "none")[0, 6:].any()
    parameters = list(module.parameters())
    wanted = torch.autograd.grad(expected.sum(), parameters)
    total = module(inputs, "sum")
    assert torch.allclose(total, expected.sum(), atol=1e-4)
    for gradient, want in zip(torch.autograd.grad(total, parameters), wanted, strict=True):
        assert torch.allclose(gradient, want, atol=1e-4)


def test_scores_are_sums_and_counts_by_segment(module):
    scorer = Scorer(module, PRECISIONS["fp32"], torch.device("cpu"))
    batch = make_batch()
    sums, counts = scorer.score(batch)
    inputs = CausalLM().inputs(batch)
    losses = losses_by_logits(module.model, inputs)
    assert counts.tolist() == [8, 6]
    assert torch.allclose(sums.float(), losses.view(2, 2, SEGMENT).sum((0, 2)), atol=1e-4)
    assert sums.dtype == counts.dtype == torch.float64
    assert all(parameter.grad is None for parameter in module.parameters())


def test_an_emptied_memory_changes_all_segments_but_the_first(module):
    scorer = Scorer(module, PRECISIONS["fp32"], torch.device("cpu"))
    batch = make_batch()._replace(reset=None)
    (kept, _), (emptied, _) = scorer.score(batch), scorer.score(batch, empty_memory=True)
    assert torch.equal(kept[0], emptied[0])
    assert kept[1] != emptied[1]


def test_the_collator_shifts_and_masks():
    collate = GPUDataCollatorForCLM("cpu")
    batch = collate([{"input_ids": [1, 2, 3]}, {"input_ids": np.array([4, 5], np.uint16)}])
    assert batch["input_ids"].tolist() == [[1, 2], [4, 5]]
    assert batch["labels"].tolist() == [[2, 3], [5, -100]]
