"""Causal language modelling, and conversations of which only the answers are learned."""

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from torch.nn import functional

from infini_model.data.loading.windows import Batch
from infini_model.model.loss import IGNORED
from infini_model.model.precision import PRECISIONS
from infini_model.objectives.causal import CausalLM, GPUDataCollatorForCLM
from infini_model.objectives.masked_diffusion import MaskedDiffusion
from infini_model.objectives.objective import LossModule
from infini_model.objectives.scoring import Scorer

SEGMENT, LENGTH, MASK = 4, 12, 16
VOCABULARY = MASK + 1
# Tokens of each document without its first, as windows count them, and of its prompt: an answer of
# several tokens, of one, one that is cut, one without a prompt, and no pair at all.
VALID, PROMPTS = [9, 5, 12, 7, 0], [3, 5, 11, 0, 0]
OBJECTIVES = {"causal": CausalLM(), "masked_diffusion": MaskedDiffusion(0, MASK)}


def two_windows():
    """Two windows of two one-segment rows; the second window starts with a document."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (2, 2, SEGMENT + 1), generator=generator)
    valid, document_starts = (
        torch.tensor([[4, 2], [4, 4]]),
        torch.tensor([[True, False], [True, True]]),
    )
    return Batch(tokens, valid, document_starts, torch.arange(2))


def pairs(first_key=0):
    """A window of each prompt with its answer."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(MASK, (len(VALID), 1, LENGTH + 1), generator=generator)
    valid, prompts = torch.tensor(VALID)[:, None], torch.tensor(PROMPTS)[:, None]
    keys = torch.arange(first_key, first_key + len(VALID))
    learnt = torch.arange(LENGTH + 1) >= prompts[:, :, None]
    return Batch(tokens, valid, None, keys, learnt)


def make_module(name="causal"):
    shape = {"vocab_size": VOCABULARY, "segment_length": SEGMENT}
    if name != "causal":
        shape |= {"segment_length": LENGTH, "memory": "none"}
        shape |= {"bidirectional": True, "mask_token_id": MASK}
    return LossModule(tiny_model(**shape), OBJECTIVES[name])


def score(module, batch, **options):
    """Loss sums, targets and bytes by segment, where token n stands for n bytes."""
    sizes = np.arange(VOCABULARY, dtype=np.int32)
    scorer = Scorer(module, PRECISIONS["fp32"], torch.device("cpu"), sizes)
    return scorer.score(batch, **options).sum(0)


def test_the_loss_its_gradients_and_the_scores_are_those_of_the_logits():
    module, batch = make_module(), two_windows()
    inputs = module.objective.inputs(batch)
    logits = module.model(inputs.input_ids, document_starts=inputs.document_starts).logits
    expected = functional.cross_entropy(logits.mT, inputs.labels, reduction="none")
    torch.testing.assert_close(module(inputs, "none"), expected)
    parameters = list(module.parameters())
    wanted = torch.autograd.grad(expected.sum(), parameters)
    total = module(inputs, "sum")
    torch.testing.assert_close(total, expected.sum())
    torch.testing.assert_close(torch.autograd.grad(total, parameters), wanted)

    sums, counts, sizes = score(module, batch)
    assert counts.tolist() == [8, 6]
    assert sizes.sum() == inputs.labels[inputs.labels != IGNORED].sum()
    torch.testing.assert_close(sums, expected.detach().view(2, 2, SEGMENT).sum((0, 2)))


def test_the_collator_shifts_and_masks():
    collate = GPUDataCollatorForCLM("cpu")
    batch = collate([{"input_ids": [1, 2, 3]}, {"input_ids": np.array([4, 5], np.uint16)}])
    assert batch["input_ids"].tolist() == [[1, 2], [4, 5]]
    assert batch["labels"].tolist() == [[2, 3], [5, IGNORED]]


def test_a_causal_model_predicts_the_answer_and_its_end_alone():
    batch = pairs()
    inputs = CausalLM().inputs(batch)
    for row, (valid, prompt) in enumerate(zip(VALID, PROMPTS, strict=True)):
        places = range(max(prompt, 1), valid + 1)
        labels = inputs.labels[row]
        assert torch.nonzero(labels != IGNORED).flatten().tolist() == [n - 1 for n in places]
        assert labels[labels != IGNORED].tolist() == batch.tokens[row, 0, list(places)].tolist()
    assert torch.equal(inputs.input_ids, batch.tokens[:, 0, :-1])


def test_diffusion_masks_every_token_of_an_answer_and_none_of_a_prompt():
    masked = torch.zeros(len(VALID), LENGTH, dtype=torch.bool)
    for first in range(0, 400, len(VALID)):
        inputs = OBJECTIVES["masked_diffusion"].inputs(pairs(first))
        masked |= inputs.input_ids == MASK
        assert torch.equal(inputs.labels != IGNORED, inputs.input_ids == MASK)
    for row, (valid, prompt) in enumerate(zip(VALID, PROMPTS, strict=True)):
        last = min(valid, LENGTH - 1) if valid else -1
        assert torch.nonzero(masked[row]).flatten().tolist() == list(range(prompt, last + 1))


def test_the_diffusion_loss_is_the_bound_per_token_of_what_is_learned():
    """What a window of each answer would have, with the prompt unmasked."""
    module, batch = make_module("masked_diffusion"), pairs()
    inputs = module.objective.inputs(batch)
    logits = module.model(inputs.input_ids).logits.clone()
    logits[..., MASK] = -torch.inf
    each = functional.cross_entropy(logits.mT, inputs.labels, reduction="none")
    total, lengths = 0.0, 0
    for row, (valid, prompt) in enumerate(zip(VALID, PROMPTS, strict=True)):
        length = min(valid, LENGTH - 1) - prompt + 1 if valid else 0
        count = int((inputs.input_ids[row] == MASK).sum())
        total, lengths = total + each[row].sum() * length / max(count, 1), lengths + length
    assert int(inputs.counted.sum()) == lengths
    loss = module(inputs, "sum") / lengths
    torch.testing.assert_close(loss, total / lengths, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_scores_and_parts_of_a_batch_sum_to_the_loss_of_the_whole(name):
    module, batch = make_module(name), pairs()
    whole = module(module.objective.inputs(batch), "sum")
    parts = [module.objective.inputs(part) for part in batch.chunk(5)]
    inputs, (*scores, sizes) = module.objective.inputs(batch), score(module, batch).sum(1)
    # Masked or not, each token that counts has the bytes that it stands for.
    ids = batch.tokens[:, 0, 1:] if name == "causal" else batch.tokens[:, 0, :-1]
    assert sizes.sum() == ids[inputs.counted].sum()
    for sums, counts in (
        scores,
        (sum(module(part, "sum") for part in parts), sum(part.counted.sum() for part in parts)),
    ):
        torch.testing.assert_close(sums.squeeze(), whole.squeeze(), rtol=1e-6, atol=0)
        assert int(counts) == int(module.objective.inputs(batch).counted.sum())
