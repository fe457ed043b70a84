"""Masked diffusion: what is masked, how it is weighted, and that the loss is the bound."""

import itertools

import pytest
import torch
from torch.nn import functional

from infini_model.config import ModelConfig
from infini_model.data.loading.windows import Batch
from infini_model.model.keyed_random import hashed, spread_evenly, uniform
from infini_model.model.llama import InfiniLlama
from infini_model.objectives.masked_diffusion import MaskedDiffusion
from infini_model.objectives.objective import LossModule

VOCABULARY, LENGTH = 12, 16
MASK = VOCABULARY - 1
NOISES = pytest.mark.parametrize("noise", ["count", "time"])


def windows(count, length=LENGTH, first_key=0, valid=None):
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(MASK, (count, 1, length + 1), generator=draw)
    return Batch(tokens, valid, None, torch.arange(first_key, first_key + count))


def make_module(noise="count", length=LENGTH, dtype=torch.float64):
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=24,
        segment_length=length,
        memory="none",
        bidirectional=True,
        mask_token_id=MASK,
        initializer_range=0.3,
    )
    return LossModule(InfiniLlama(config).to(dtype), MaskedDiffusion(0, MASK, noise))


@NOISES
def test_the_masks_of_a_window_depend_on_its_key_and_the_seed_alone(noise):
    objective, batch = MaskedDiffusion(7, MASK, noise), windows(8)
    whole = objective.inputs(batch)
    for part, own in zip(batch.chunk(4), range(0, 8, 2), strict=True):
        inputs = objective.inputs(part)
        for ours, theirs in zip(inputs, whole, strict=True):
            assert ours is theirs is None or torch.equal(ours, theirs[own : own + 2])
    assert not torch.equal(MaskedDiffusion(8, MASK, noise).inputs(batch)[0], whole[0])
    later = batch._replace(keys=batch.keys + 8)
    assert not torch.equal(objective.inputs(later)[0], whole[0])


@NOISES
def test_masked_tokens_are_the_labels_and_all_others_are_seen(noise):
    batch = windows(64)
    ids = batch.tokens[:, 0, :-1]
    inputs = MaskedDiffusion(0, MASK, noise).inputs(batch)
    masked = inputs.input_ids == MASK
    assert torch.equal(inputs.labels[masked], ids[masked])
    assert torch.equal(inputs.input_ids[~masked], ids[~masked])
    assert (inputs.labels[~masked] == -100).all()
    assert inputs.counted.all()


def test_a_count_is_weighted_by_its_inverse_and_never_zero():
    inputs = MaskedDiffusion(0, MASK).inputs(windows(200))
    counts = (inputs.input_ids == MASK).sum(1)
    assert counts.min() >= 1
    assert torch.allclose(counts * inputs.weights[:, 0], torch.tensor(float(LENGTH)))


@pytest.mark.parametrize("first", [0, 12345, 1 << 33])
def test_the_counts_of_any_batch_are_spread_evenly(first):
    inputs = MaskedDiffusion(0, MASK).inputs(windows(64, length=64, first_key=first))
    counts = (inputs.input_ids == MASK).sum(1).sort().values
    assert (counts - torch.arange(1, 65)).abs().max() <= 4


@NOISES
def test_every_position_is_masked_equally_often_and_independently_of_others(noise):
    many = 20_000
    masked = MaskedDiffusion(0, MASK, noise).inputs(windows(many)).input_ids == MASK
    shares = masked.double().mean(0)
    expected = (LENGTH + 1) / (2 * LENGTH) if noise == "count" else 0.5
    assert (shares - expected).abs().max() < 5 * (0.25 / many) ** 0.5
    # Which ones are masked together depends on their number alone.
    together = torch.einsum("bi,bj->ij", masked.double(), masked.double()) / many
    pairs = together[~torch.eye(LENGTH, dtype=torch.bool)]
    assert pairs.max() - pairs.min() < 10 * (0.25 / many) ** 0.5


@NOISES
def test_padding_is_seen_and_never_masked(noise):
    valid = torch.tensor([[3], [0], [LENGTH]])
    inputs = MaskedDiffusion(0, MASK, noise).inputs(windows(3, valid=valid))
    assert inputs.counted.sum(1).tolist() == [4, 0, LENGTH]
    assert not ((inputs.labels != -100) & ~inputs.counted).any()


@NOISES
def test_the_loss_and_its_gradients_are_those_of_the_logits_without_the_mask_token(noise):
    module = make_module(noise)
    inputs = module.objective.inputs(windows(4))
    logits = module.model(inputs.input_ids).logits.clone()
    logits[..., MASK] = -torch.inf
    each = functional.cross_entropy(logits.mT, inputs.labels, reduction="none")
    expected = each * inputs.weights
    torch.testing.assert_close(module(inputs, "none"), expected)
    parameters = list(module.parameters())
    ours = torch.autograd.grad(module(inputs, "sum"), parameters)
    theirs = torch.autograd.grad(expected.sum(), parameters)
    torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        torch.testing.assert_close(module(inputs, "sum"), expected.sum())


def test_the_mask_token_has_no_probability():
    module = make_module()
    inputs = module.objective.inputs(windows(4))
    before = module(inputs, "sum")
    (gradient,) = torch.autograd.grad(before, module.model.lm_head.weight)
    assert not gradient[MASK].any()
    with torch.no_grad():
        module.model.lm_head.weight[MASK] += 100.0
    assert torch.equal(module(inputs, "sum"), before)


@NOISES
def test_the_expected_loss_is_the_mean_over_orders_of_the_likelihood(noise):
    """Equation 6 of LLaDA: what any-order autoregression assigns to the window, on average."""
    length, draws = 4, 40_000
    module, batch = make_module(noise, length), windows(1, length)
    ids = batch.tokens[:, 0, :-1]
    subsets = torch.tensor(list(itertools.product([False, True], repeat=length)))
    logits = module.model(ids.masked_fill(subsets, MASK)).logits.detach()
    logits[..., MASK] = -torch.inf
    losses = functional.cross_entropy(logits.mT, ids.expand(len(subsets), -1), reduction="none")
    row = {tuple(subset): i for i, subset in enumerate(subsets.tolist())}
    orders = list(itertools.permutations(range(length)))
    total = 0.0
    for order in orders:
        for known in range(length):
            hidden = tuple(position not in order[:known] for position in range(length))
            total += float(losses[row[hidden], order[known]])
    many = Batch(batch.tokens.expand(draws, -1, -1), None, None, torch.arange(draws))
    inputs = module.objective.inputs(many)
    masked = (inputs.input_ids == MASK).tolist()
    chosen = torch.tensor([row[tuple(subset)] for subset in masked])
    each = (losses[chosen] * (inputs.labels != -100) * inputs.weights).sum(1)
    error = each.std() / draws**0.5
    assert abs(each.mean() - total / len(orders)) < 4 * error + 1e-3 * each.mean()


def test_counts_leave_less_than_half_of_the_deviation_that_times_leave():
    """Of the mean loss of batches of 8 windows, at the same weights."""
    deviations = []
    for noise in ("count", "time"):
        module = make_module(noise, dtype=torch.float32)
        with torch.no_grad():
            means = [
                module(module.objective.inputs(windows(8, first_key=8 * number))) / (8 * LENGTH)
                for number in range(100)
            ]
        deviations.append(torch.stack(means).std())
    assert deviations[0] < 0.5 * deviations[1]


def test_hashes_are_uniform_and_change_with_every_part():
    keys = torch.arange(4096)
    numbers = uniform(hashed(3, keys))
    assert 0.0 <= numbers.min() < 0.01 < 0.99 < numbers.max() < 1.0
    assert abs(numbers.mean() - 0.5) < 5 / (12 * 4096) ** 0.5
    bits = torch.stack([hashed(3, keys) >> n & 1 for n in range(64)]).double().mean(1)
    assert (bits - 0.5).abs().max() < 5 * (0.25 / 4096) ** 0.5
    assert len({int(x) for x in hashed(3, keys)} & {int(x) for x in hashed(4, keys)}) == 0
    assert not torch.equal(spread_evenly(3, keys), spread_evenly(4, keys))
