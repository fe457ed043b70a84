"""Masked and block diffusion: what is masked, its weights, and that the loss is the bound."""

import itertools

import pytest
import torch
from tiny_models import tiny_model
from torch.nn import functional

from infini_model.data.loading.windows import Batch
from infini_model.model.llama import InfiniLlama
from infini_model.objectives.masked_diffusion import MaskedDiffusion
from infini_model.objectives.objective import LossModule

VOCABULARY, LENGTH, BLOCKS = 12, 4, 6
MASK = VOCABULARY - 1


def windows(count, blocks=BLOCKS, length=LENGTH, first_key=0):
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(MASK, (count, 1, blocks * length + 1), generator=draw)
    return Batch(tokens, None, None, torch.arange(first_key, first_key + count))


def masks(batch, length=LENGTH, seed=0):
    """Which tokens are masked, by block, [B, S, L]."""
    inputs = MaskedDiffusion(seed, MASK, length).inputs(batch)
    return (inputs.input_ids == MASK).unflatten(1, (-1, length))


def make_module(length=LENGTH):
    diffusion = {"memory_query_shift": True, "bidirectional": True, "mask_token_id": MASK}
    shape = {"vocab_size": VOCABULARY, "segment_length": length, "initializer_range": 0.3}
    return LossModule(tiny_model(**shape | diffusion), MaskedDiffusion(0, MASK, length))


def losses_of(logits, labels):
    """The loss of each label, where the mask token has no probability."""
    logits = logits.clone()
    logits[..., MASK] = -torch.inf
    return functional.cross_entropy(logits.mT, labels, reduction="none")


def test_a_window_of_one_block_is_masked_diffusion():
    batch, module = windows(8, blocks=1), make_module()
    bare = InfiniLlama(module.model.config.model_copy(update={"memory": "none"})).double()
    bare.load_state_dict(module.model.state_dict(), strict=False)
    plain = LossModule(bare, MaskedDiffusion(0, MASK))
    for given in (batch, batch._replace(valid=torch.tensor([[3], [0], [4], [1]] * 2))):
        ours, theirs = module.objective.inputs(given), plain.objective.inputs(given)
        for one, other in zip(ours, theirs, strict=True):
            assert one is other is None or torch.equal(one, other)
        torch.testing.assert_close(module(ours, "none"), plain(theirs, "none"))


def test_the_masks_depend_on_seed_window_and_block_alone():
    batch = windows(64)
    whole = masks(batch)
    for part, own in zip(batch.chunk(4), whole.chunk(4), strict=True):
        assert torch.equal(masks(part), own)
    assert not torch.equal(masks(batch, seed=1), whole)
    assert not torch.equal(masks(batch._replace(noise_keys=batch.noise_keys + 64)), whole)
    counts = whole.sum(2)
    assert all((counts[:, 0] != counts[:, block]).any() for block in range(1, BLOCKS))


def test_masked_tokens_are_the_labels_and_all_others_are_seen():
    batch = windows(64)
    ids = batch.tokens[:, 0, :-1]
    inputs = MaskedDiffusion(0, MASK, LENGTH).inputs(batch)
    masked = inputs.input_ids == MASK
    assert torch.equal(inputs.labels[masked], ids[masked])
    assert torch.equal(inputs.input_ids[~masked], ids[~masked])
    assert (inputs.labels[~masked] == -100).all()
    assert inputs.counted.all()
    counts = masked.unflatten(1, (-1, LENGTH)).sum(2)
    assert counts.min() >= 1
    assert torch.allclose(inputs.weights.unflatten(1, (-1, LENGTH)), LENGTH / counts[..., None])


@pytest.mark.parametrize(("rows", "blocks"), [(1, 64), (64, 1), (64, 34)])
@pytest.mark.parametrize("first", [0, 1 << 33])
def test_the_counts_are_spread_evenly_over_windows_and_blocks(rows, blocks, first):
    counts = masks(windows(rows, blocks, 64, first), length=64).sum(2)
    for each in [counts.flatten()] + (list(counts.unbind(1)) if rows > 1 else []):
        expected = (torch.arange(len(each)) + 0.5) * 64 / len(each)
        assert (each.sort().values - expected).abs().max() <= 5


def test_padding_is_seen_and_never_masked():
    tokens = torch.randint(MASK, (2, BLOCKS, LENGTH + 1))
    valid = torch.tensor([[4, 4, 2, 0, 0, 0], [4, 1, 4, 4, 4, 3]])
    inputs = MaskedDiffusion(0, MASK, LENGTH).inputs(Batch(tokens, valid, None, torch.arange(2)))
    by_block = inputs.counted.unflatten(1, (-1, LENGTH)).sum(2)
    assert by_block.tolist() == [[4, 4, 3, 0, 0, 0], [4, 2, 4, 4, 4, 4]]
    assert not ((inputs.labels != -100) & ~inputs.counted).any()


def test_the_loss_and_its_gradients_are_those_of_the_logits():
    module, batch = make_module(), windows(4)
    document_starts = torch.arange(BLOCKS).expand(4, -1) == 3
    inputs = module.objective.inputs(batch._replace(document_starts=document_starts))
    clean = batch.tokens[:, 0, :-1]
    hidden = module.model.hidden(inputs.input_ids, document_starts, past_ids=clean)
    expected = losses_of(module.model.lm_head(hidden), inputs.labels) * inputs.weights
    torch.testing.assert_close(module(inputs, "none"), expected)
    parameters = list(module.parameters())
    ours = torch.autograd.grad(module(inputs, "sum"), parameters)
    theirs = torch.autograd.grad(expected.sum(), parameters)
    torch.testing.assert_close(ours, theirs)
    assert all(torch.count_nonzero(gradient) for gradient in ours)


def test_the_expected_loss_is_the_mean_over_orders_in_each_block_given_those_before():
    """Equation 6 of LLaDA for each block: what any-order autoregression assigns, on average."""
    length, blocks, draws = 3, 3, 30_000
    module, batch = make_module(length), windows(1, blocks, length)
    ids = batch.tokens[:, 0, :-1]
    subsets = torch.tensor(list(itertools.product([False, True], repeat=length)))
    masked = ids.masked_fill(subsets.repeat(1, blocks), MASK)
    hidden = module.model.hidden(masked, past_ids=ids.expand_as(masked))
    losses = losses_of(module.model.lm_head(hidden).detach(), ids.expand_as(masked))
    losses = losses.unflatten(1, (blocks, length))
    row = {tuple(subset): i for i, subset in enumerate(subsets.tolist())}
    orders = list(itertools.permutations(range(length)))
    total = 0.0
    for order in orders:
        for known in range(length):
            hidden_ones = tuple(position not in order[:known] for position in range(length))
            total += float(losses[row[hidden_ones], :, order[known]].sum())
    many = Batch(batch.tokens.expand(draws, -1, -1), None, None, torch.arange(draws))
    inputs = module.objective.inputs(many)
    drawn = (inputs.input_ids == MASK).unflatten(1, (blocks, length))
    chosen = (drawn * torch.tensor([4, 2, 1])).sum(2)
    each = losses[chosen, torch.arange(blocks)] * drawn
    each = (each.flatten(1) * inputs.weights).sum(1)
    error = each.std() / draws**0.5
    assert abs(each.mean() - total / len(orders)) < 4 * error + 1e-3 * each.mean()
