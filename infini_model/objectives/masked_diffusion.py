"""Masked diffusion (LLaDA, arXiv 2502.09992): fill in the masked tokens of a window.

Of a window of L tokens l are masked, l drawn from 1 to L, and a bidirectional model predicts them
from all others, at their own positions. With each loss weighted by L / l, the expected sum is an
upper bound of the window's negative log-likelihood (equation 6). Masking each token with a drawn
probability (equation 3) has the same expectation; but l can be spread evenly over the windows of a
batch, which leaves a third of the variance.

The sum is divided by the tokens that could have been masked, so the loss is in nats per token. Of a
conversation only what is learned is masked (algorithm 2), with the end of text that closes it, and
L is the number of those tokens. The noise of a window depends only on the seed and the window's
key, never on batches or devices.

In block diffusion (arXiv 2503.09573) the segments of a window are blocks, from left to right, and
each is filled in as a window is, given all the blocks before it: the sum over blocks bounds the
window's negative log-likelihood. Here a block does not attend to all those before it: it reads them
from the memory of Infini-attention (arXiv 2404.07143) and sees those in its window, so generation
holds as much for a long text as for a short one. All blocks are trained at once by two streams of
the same weights: a clean one writes the memory, and in a noisy one each masked block reads the
memory of the clean blocks before it, and sees them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infini_model.data.loading.windows import Batch
from infini_model.model.llama import InfiniLlama
from infini_model.model.loss import IGNORED
from infini_model.model.random import hashed, spread_evenly
from infini_model.objectives.objective import REDUCTIONS, Inputs, Reduction


class MaskedDiffusion:
    """Prediction of masked tokens; the loss is a bound of the negative log-likelihood per token.

    With a `block_length`, that of the model's segments, it is block diffusion: each block has noise
    of its own.
    """

    def __init__(self, seed: int, mask_token_id: int, block_length: int | None = None) -> None:
        self.seed, self.mask_token_id, self.block_length = seed, mask_token_id, block_length

    def inputs(self, batch: Batch) -> Inputs:
        """Tokens 0 … L - 1 of each row, some of them masked; the labels are the masked tokens."""
        tokens, valid, document_starts, keys, learnt = batch
        length = tokens.size(2) - 1
        ids = tokens.narrow(2, 0, length).flatten(1)
        maskable = ids != self.mask_token_id
        positions = torch.arange(length, device=ids.device)
        if valid is not None:
            # It counts the tokens that have a next one in their document; none is an empty row.
            within = (positions <= valid.unsqueeze(2)) & (valid > 0).unsqueeze(2)
            maskable &= within.flatten(1)
        if learnt is not None:
            maskable &= learnt.narrow(2, 0, length).flatten(1)
        blocks = maskable.view(len(ids), -1, self.block_length or length * tokens.size(1))
        drawn, block_weights = self._draw(keys, blocks)
        masked = drawn.flatten(1)
        weights = block_weights.unsqueeze(2).expand_as(blocks).flatten(1)
        return Inputs(
            ids.masked_fill(masked, self.mask_token_id),
            ids.masked_fill(~masked, IGNORED),
            document_starts,
            maskable,
            weights.float(),
        )

    def _draw(self, keys: Tensor, maskable: Tensor) -> tuple[Tensor, Tensor]:
        """Masked positions, bool [B, S, L], and the weight of each block, float64 [B, S]."""
        lengths = maskable.sum(2)
        blocks = torch.arange(maskable.size(1), device=keys.device)
        counts = (spread_evenly(self.seed, keys.unsqueeze(1), blocks) * lengths).long() + 1
        counts = torch.minimum(counts, lengths)
        positions = torch.arange(maskable[0].numel(), device=keys.device)
        hashes = hashed(self.seed, keys.unsqueeze(1), positions).view(maskable.shape)
        hashes = hashes.masked_fill(~maskable, torch.iinfo(torch.int64).max)
        largest = hashes.sort(2).values.gather(2, (counts - 1).clamp(min=0).unsqueeze(2))
        masked = (hashes <= largest) & maskable
        return masked, lengths.double() / counts.clamp(min=1)

    def loss(self, model: InfiniLlama, inputs: Inputs, reduction: Reduction) -> Tensor:
        """Weighted cross entropy in nats; the mask token has no probability.

        Logits are computed for masked positions only.
        """
        ids, labels, starts = inputs.input_ids, inputs.labels, inputs.document_starts
        chosen = labels != IGNORED
        clean = None if self.block_length is None else torch.where(chosen, labels, ids)
        hidden = model.hidden(ids, starts, inputs.without, past_ids=clean)
        targets, output = labels[chosen], model.lm_head.weight
        weights = None if inputs.weights is None else inputs.weights[chosen]
        losses = REDUCTIONS[reduction](
            hidden[chosen], output, targets, row_weights=weights, excluded=self.mask_token_id
        )
        if reduction == "sum":
            return losses
        zeros = torch.zeros_like(labels, dtype=losses.dtype)
        return zeros.masked_scatter(chosen, losses)
