"""Block diffusion (arXiv 2503.09573) whose past is a compressive memory and a window.

The segments of a window are blocks, from left to right. Each is filled in as a window of masked
diffusion (arXiv 2502.09992) is, given all the blocks before it, so the sum over blocks bounds the
window's negative log-likelihood. Here a block does not attend to all those before it: it reads them
from the memory of Infini-attention (arXiv 2404.07143) and sees those in its window, so generation
holds as much for a long text as for a short one.

All blocks are trained at once by two streams of the same weights: a clean one writes the memory,
and in a noisy one each masked block reads the memory of the clean blocks before it, and sees them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infini_model.model.llama import InfiniLlama
from infini_model.model.loss import IGNORED
from infini_model.objectives.masked_diffusion import MaskedDiffusion
from infini_model.objectives.objective import Inputs


class BlockDiffusion(MaskedDiffusion):
    """Masked diffusion of each segment, with noise of its own, given the segments before it."""

    def __init__(self, seed: int, mask_token_id: int, segment_length: int) -> None:
        super().__init__(seed, mask_token_id)
        self.block_length = segment_length

    def hidden(self, model: InfiniLlama, inputs: Inputs) -> Tensor:
        """The inputs of `lm_head` in the noisy stream, [B, T, hidden]."""
        clean = torch.where(inputs.labels == IGNORED, inputs.input_ids, inputs.labels)
        starts, without = inputs.document_starts, inputs.without
        return model.hidden(inputs.input_ids, starts, without, past_ids=clean)
