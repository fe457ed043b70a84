"""The type of the matrix products; weights, moments and losses are float32 in every precision."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch


class Precision(NamedTuple):
    """`name` is bf16, fp16 or fp32; `products` the dtype under autocast, None without it."""

    name: Literal["bf16", "fp16", "fp32"]
    products: torch.dtype | None

    def autocast(self, device: torch.device) -> torch.autocast:
        """The context in which a model computes on `device`."""
        return torch.autocast(device.type, self.products, enabled=self.products is not None)


PRECISIONS = {
    "bf16": Precision("bf16", torch.bfloat16),
    "fp16": Precision("fp16", torch.float16),
    "fp32": Precision("fp32", None),
}


def resolve_precision(
    setting: Literal["auto", "bf16", "fp16", "fp32"], device: torch.device
) -> Precision:
    """`training.precision` with auto decided by the device: bf16 on CUDA, fp32 on a CPU."""
    if setting == "auto":
        setting = "bf16" if device.type == "cuda" else "fp32"
    return PRECISIONS[setting]
