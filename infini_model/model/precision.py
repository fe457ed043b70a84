"""Precision of matrix products.

Trained weights, optimizer state, losses and the residual stream between layers are always float32.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn


class Precision(NamedTuple):
    """A training precision; `matmul_dtype` is that of autocast, None means no autocast."""

    name: Literal["bf16", "fp16", "fp32"]
    matmul_dtype: torch.dtype | None

    def autocast(self, device: torch.device) -> torch.autocast:
        """The context in which to run a model on `device`."""
        return torch.autocast(device.type, self.matmul_dtype, enabled=self.matmul_dtype is not None)


def product_input(x: Tensor) -> Tensor:
    """`x`, which several products share, in the dtype that autocast would cast it to for each.

    Outside autocast it is `x` itself. The gradients that the products return are then summed in
    that dtype, and cast back once.
    """
    device = x.device.type
    # Autocast leaves float64 as it is.
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))


def as_operand(weight: Tensor, x: Tensor) -> Tensor:
    """`weight` in the dtype of `x`, for their product; under autocast, which casts, as it is."""
    return weight if torch.is_autocast_enabled(x.device.type) else weight.to(x.dtype)


def cast_weights(model: nn.Module, precision: Precision) -> None:
    """Keep the weights of the linear layers of a model in the dtype of autocast, for inference.

    Without gradients autocast would cast each in each pass, even in that of a single token. Passes
    under autocast compute the same bits. An output layer is no longer tied to the embedding.
    """
    for layer in model.modules():
        # Autocast leaves float64 as it is.
        if isinstance(layer, nn.Linear) and layer.weight.dtype != torch.float64:
            weight = layer.weight.detach().to(precision.matmul_dtype)
            layer.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)


PRECISIONS = {
    "bf16": Precision("bf16", torch.bfloat16),
    "fp16": Precision("fp16", torch.float16),
    "fp32": Precision("fp32", None),
}


def resolve_precision(
    setting: Literal["auto", "bf16", "fp16", "fp32"], device: torch.device
) -> Precision:
    """Resolve `training.precision`: auto is fp32 on a CPU, bf16 on GPUs that have it, else fp16.

    GPUs below compute capability 8.0, such as the T4, compute bf16 in software, and have too little
    shared memory for its kernels.
    """
    if setting == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        setting = "fp32" if device.type != "cuda" else "bf16" if has_bf16 else "fp16"
    return PRECISIONS[setting]
