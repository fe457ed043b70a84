"""Of prompts and answers only answers are learned, each counting the same."""

import pytest
import torch
from torch.nn import functional

from infini_model.config import ModelConfig
from infini_model.data.loading.windows import Batch
from infini_model.model.llama import InfiniLlama
from infini_model.model.loss import IGNORED
from infini_model.model.precision import PRECISIONS
from infini_model.objectives.causal import CausalLM
from infini_model.objectives.masked_diffusion import MaskedDiffusion
from infini_model.objectives.objective import LossModule
from infini_model.objectives.scoring import Scorer

LENGTH, MASK = 12, 16
VOCABULARY = MASK + 1
# Tokens of each document without its first, as windows count them, and of its prompt: an answer of
# several tokens, of one, one that is cut, one without a prompt, and no pair at all.
VALID, PROMPTS = [9, 5, 12, 7, 0], [3, 5, 11, 0, 0]
OBJECTIVES = {
    "causal": CausalLM(),
    "count": MaskedDiffusion(0, MASK, "count"),
    "time": MaskedDiffusion(0, MASK, "time"),
}


def make_batch(first_key=0):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(MASK, (len(VALID), 1, LENGTH + 1), generator=generator)
    valid, prompts = torch.tensor(VALID)[:, None], torch.tensor(PROMPTS)[:, None]
    keys = torch.arange(first_key, first_key + len(VALID))
    return Batch(tokens, valid, None, keys, prompts)


def make_module(name):
    torch.manual_seed(0)
    diffusion = name != "causal"
    config = ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=24,
        segment_length=LENGTH if diffusion else 4,
        bidirectional=diffusion,
        memory="none" if diffusion else "linear",
        mask_token_id=MASK if diffusion else None,
    )
    return LossModule(InfiniLlama(config), OBJECTIVES[name]).double()


def test_a_causal_model_predicts_the_answer_and_its_end_alone():
    batch = make_batch()
    inputs = CausalLM().inputs(batch)
    for row, (valid, prompt) in enumerate(zip(VALID, PROMPTS, strict=True)):
        targets = {place: int(batch.tokens[row, 0, place]) for place in range(1, valid + 1)}
        answer = [token for place, token in targets.items() if place >= prompt]
        labels = inputs.labels[row]
        assert labels[labels != IGNORED].tolist() == answer
        positions = torch.nonzero(labels != IGNORED).squeeze(1).tolist()
        assert positions == list(range(max(prompt - 1, 0), valid))
    assert torch.equal(inputs.input_ids, batch.tokens[:, 0, :-1])


@pytest.mark.parametrize("name", ["count", "time"])
def test_diffusion_masks_every_token_of_an_answer_and_none_of_a_prompt(name):
    masked = torch.zeros(len(VALID), LENGTH, dtype=torch.bool)
    for first in range(0, 400, len(VALID)):
        inputs = OBJECTIVES[name].inputs(make_batch(first))
        masked |= inputs.input_ids == MASK
        assert torch.equal(inputs.labels != IGNORED, inputs.input_ids == MASK)
    for row, (valid, prompt) in enumerate(zip(VALID, PROMPTS, strict=True)):
        last = min(valid, LENGTH - 1) if valid else -1
        assert torch.nonzero(masked[row]).squeeze(1).tolist() == list(range(prompt, last + 1))


def test_the_causal_loss_is_the_mean_over_answers_of_the_mean_over_their_tokens():
    module, batch = make_module("causal"), make_batch()
    inputs = module.objective.inputs(batch)
    logits = module.model(inputs.input_ids).logits
    each = functional.cross_entropy(logits.mT, inputs.labels, reduction="none")
    has = (inputs.labels != IGNORED).sum(1)
    means = [losses.sum() / count for losses, count in zip(each, has, strict=True) if count]
    assert len(means) == 4
    expected = torch.stack(means).mean()
    loss = module(inputs, "sum") / inputs.counted.sum()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    parameters = list(module.parameters())
    ours = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    theirs = torch.autograd.grad(expected, parameters, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["count", "time"])
def test_the_diffusion_loss_is_the_mean_over_answers_of_the_bound_per_token(name):
    """What a window of each answer would have, with the prompt unmasked."""
    module, batch = make_module(name), make_batch()
    inputs = module.objective.inputs(batch)
    plain = module.objective.inputs(batch._replace(prompts=None))
    logits = module.model(inputs.input_ids).logits.clone()
    logits[..., MASK] = -torch.inf
    each = functional.cross_entropy(logits.mT, inputs.labels, reduction="none")
    means = []
    for row, (valid, prompt) in enumerate(zip(VALID, PROMPTS, strict=True)):
        length = min(valid, LENGTH - 1) - prompt + 1 if valid else 0
        count = int((inputs.input_ids[row] == MASK).sum())
        if length:
            # The shares by which `time` masks are drawn per window, whatever is masked in it.
            weight = length / count if name == "count" else float(plain.weights[row, 0])
            means.append(each[row].sum() * weight / length)
    loss = module(inputs, "sum") / inputs.counted.sum()
    torch.testing.assert_close(loss, torch.stack(means).mean(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_scores_are_the_sums_of_the_training_loss(name):
    module, batch = make_module(name), make_batch()
    scores = Scorer(module, PRECISIONS["fp32"], torch.device("cpu")).score(batch)
    inputs = module.objective.inputs(batch)
    torch.testing.assert_close(scores.sum(1)[0], module(inputs, "sum").detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(scores.sum(1)[1], inputs.counted.sum())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_loss_is_the_same_however_the_batch_is_divided(name):
    module, batch = make_module(name), make_batch()
    totals = torch.stack([module(module.objective.inputs(part), "sum") for part in batch.chunk(5)])
    counts = torch.stack([module.objective.inputs(part).counted.sum() for part in batch.chunk(5)])
    torch.testing.assert_close(counts.sum(), torch.tensor(4.0, dtype=torch.float64))
    whole = module(module.objective.inputs(batch), "sum")
    torch.testing.assert_close(totals.sum(), whole, rtol=1e-6, atol=0)
