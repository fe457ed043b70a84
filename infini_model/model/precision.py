"""Precision of the matrix products. Weights, optimizer state and losses are always float32."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch


class Precision(NamedTuple):
    """`products` is the dtype of the matrix products under autocast; None means no autocast."""

    name: Literal["bf16", "fp16", "fp32"]
    products: torch.dtype | None

    def autocast(self, device: torch.device) -> torch.autocast:
        """The context in which to run a model on `device`."""
        return torch.autocast(device.type, self.products, enabled=self.products is not None)


PRECISIONS = {
    "bf16": Precision("bf16", torch.bfloat16),
    "fp16": Precision("fp16", torch.float16),
    "fp32": Precision("fp32", None),
}


def resolve_precision(
    setting: Literal["auto", "bf16", "fp16", "fp32"], device: torch.device
) -> Precision:
    """Resolve `training.precision`: auto is bf16 on CUDA and fp32 on a CPU."""
    if setting == "auto":
        setting = "bf16" if device.type == "cuda" else "fp32"
    return PRECISIONS[setting]
