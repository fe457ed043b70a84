"""Causal language modelling: each position predicts the next token of its own document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infini_model.data.loading.windows import Batch
from infini_model.model.llama import InfiniLlama
from infini_model.model.loss import IGNORED, summed_loss, token_losses
from infini_model.objectives.objective import Inputs, Reduction


class CausalLM:
    """Next-token prediction; the loss is the mean cross entropy over all targets."""

    def inputs(self, batch: Batch) -> Inputs:
        """Tokens 0 … L - 1 of each row as inputs, 1 … L as labels."""
        tokens, valid, reset, _ = batch
        length = tokens.size(2) - 1
        labels = tokens.narrow(2, 1, length)
        if valid is not None:
            positions = torch.arange(length, device=tokens.device)
            labels = labels.masked_fill(positions >= valid.unsqueeze(2), IGNORED)
        return Inputs(tokens.narrow(2, 0, length).flatten(1), labels.flatten(1), reset)

    def counted(self, inputs: Inputs) -> Tensor:
        """Every position that has a target."""
        return inputs.labels != IGNORED

    def loss(self, model: InfiniLlama, inputs: Inputs, reduction: Reduction) -> Tensor:
        """Cross entropy in nats, computed without materializing all logits."""
        hidden, _ = model.hidden(inputs.input_ids, reset=inputs.reset)
        flat, targets = hidden.flatten(0, 1), inputs.labels.flatten()
        if reduction == "none":
            return token_losses(flat, model.lm_head.weight, targets).view_as(inputs.labels)
        return summed_loss(flat, model.lm_head.weight, targets)


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
