"""Causal language modelling: each position predicts the next token of its own document.

Of a conversation only what is learned is predicted: the assistant's messages and the end of text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infini_model.data.loading.windows import Batch
from infini_model.model.llama import InfiniLlama
from infini_model.model.loss import IGNORED
from infini_model.objectives.objective import REDUCTIONS, Inputs, Reduction


class CausalLM:
    """Next-token prediction; the loss is the mean cross entropy over all targets."""

    def inputs(self, batch: Batch) -> Inputs:
        """Tokens 0 … L - 1 of each row as inputs, 1 … L as labels."""
        tokens, valid, document_starts, _, learnt = batch
        length = tokens.size(2) - 1
        labels = tokens.narrow(2, 1, length)
        positions = torch.arange(length, device=tokens.device)
        if valid is not None:
            labels = labels.masked_fill(positions >= valid.unsqueeze(2), IGNORED)
        if learnt is not None:
            labels = labels.masked_fill(~learnt.narrow(2, 1, length), IGNORED)
        labels = labels.flatten(1)
        ids = tokens.narrow(2, 0, length).flatten(1)
        return Inputs(ids, labels, document_starts, labels != IGNORED)

    def loss(self, model: InfiniLlama, inputs: Inputs, reduction: Reduction) -> Tensor:
        """Cross entropy in nats, computed without materializing all logits."""
        hidden = model.hidden(inputs.input_ids, inputs.document_starts, inputs.without)
        targets, output = inputs.labels.flatten(), model.lm_head.weight
        losses = REDUCTIONS[reduction](hidden.flatten(0, 1), output, targets)
        return losses if reduction == "sum" else losses.view_as(inputs.labels)


class GPUDataCollatorForCLM:
    """Collates rows of token ids into `input_ids` and `labels` (the next token) on a device."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """`examples[i]["input_ids"]` holds at most T + 1 ids; missing labels are -100.

        Returns `input_ids` and `labels`, each int64 [len(examples), T].
        """
        rows = [torch.as_tensor(np.asarray(row["input_ids"], np.int64)) for row in examples]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORED)
        ids = ids.to(self.device)
        return {"input_ids": ids[:, :-1].clamp(min=0), "labels": ids[:, 1:].contiguous()}
