"""Custom operators that the CPU computes chunk by chunk, and CUDA by Triton kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef


def operator(module: str, kernel: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Register the decorated function as an operator, with a kernel of `triton_<module>` on CUDA.

    What the kernels do not compute, the decorated function does on CUDA, too.
    """

    def define(definition: Callable[..., Any]) -> CustomOpDef:
        name = f"infini_model::{definition.__name__.removeprefix('_')}"
        registered = torch.library.custom_op(name, definition, mutates_args=())

        @registered.register_kernel("cuda")
        def _(*inputs: Tensor) -> Any:
            if not _kernels_compute(inputs):
                return definition(*inputs)
            launch = importlib.import_module(f"infini_model.model.kernels.triton_{module}")
            return getattr(launch, kernel)(*inputs)

        return registered

    return define


def _kernels_compute(inputs: tuple[Tensor, ...]) -> bool:
    """Whether the Triton kernels are precise enough, and their blocks fit a multiprocessor."""
    dtypes, head_dim = {x.dtype for x in inputs}, inputs[0].size(-1)
    if torch.float64 in dtypes:
        return False
    return head_dim <= (128 if dtypes == {torch.float32} else 256)
