"""The operators of the memory: shift its keys, read it onto local attention, sum what is written.

They are plain PyTorch, differentiated by autograd, and on CUDA custom operators: forward and
backward one Triton kernel each, for heads up to 256 wide, or 128 in float32. Features and all sums
are float32 (float64 for float64) for any input dtype, also under autocast.

The features of the residual memory are φ(x) = [softmax(c x), softmax(−c x)], of twice the width
(Hedgehog, arXiv 2402.04347), where c is `SHARPNESS`: each is bounded by 1 and together they sum to
2, so nothing needs a normaliser.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional

Function = TypeVar("Function", bound=Callable[..., Any])

# What the features of a residual memory multiply keys and queries by, before the softmax: found by
# `benchmarks.memory_gain`.
SHARPNESS = 2.0

# Epsilon of the RMSNorm of what is read from a residual memory.
READ_EPSILON = 1e-6


def memory_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the memory for activations of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def two_softmaxes(x: Tensor) -> Tensor:
    """φ, the features of the residual memory, [..., 2 D] of x [..., D], in the memory's dtype."""
    x = x.to(memory_dtype(x.dtype)) * SHARPNESS
    return torch.stack((x, -x), dim=-2).softmax(-1).flatten(-2)


def operator(
    module: str, fake: Callable[..., Any], *, summand: int | None = None
) -> Callable[[Function], Function]:
    """Compute the decorated function on CUDA by `<name>_forward` and `<name>_backward` of a module.

    The first takes the arguments, the second the gradients of the results and then the arguments,
    and returns those of the arguments. What the kernels do not take, the function computes there,
    too, and it is never opaque to `torch.compile` elsewhere.

    Args:
        module: The kernels are in `triton_<module>`, imported when they are first used.
        fake: The results without their numbers, as the kernels lay them out.
        summand: An argument that is added to the result, so that its gradient is the result's; the
            backward kernel does not take it.
    """

    def define(definition: Function) -> Function:
        name = definition.__name__

        def launch(direction: str, *inputs: Tensor) -> Any:
            kernels = importlib.import_module(f"infini_model.model.kernels.triton_{module}")
            return getattr(kernels, f"{name}_{direction}")(*inputs)

        schema = torch.library.infer_schema(definition, mutates_args=())
        forward = torch.library.custom_op(
            f"infini_model::{name}",
            functools.partial(launch, "forward"),
            mutates_args=(),
            schema=schema,
        )
        backward = torch.library.custom_op(
            f"infini_model::{name}_backward",
            lambda grads, inputs: list(launch("backward", *grads, *inputs)),
            mutates_args=(),
            schema="(Tensor[] grads, Tensor[] inputs) -> Tensor[]",
        )
        forward.register_fake(fake)
        backward.register_fake(lambda _, inputs: [torch.empty_like(x) for x in inputs])

        def save(ctx: Any, inputs: tuple[Tensor, ...], output: object) -> None:  # noqa: ARG001
            ctx.save_for_backward(*(x for at, x in enumerate(inputs) if at != summand))

        def gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
            found = backward(list(grads), list(ctx.saved_tensors))
            return tuple(found if summand is None else (*found[:summand], *grads, *found[summand:]))

        forward.register_autograd(gradients, setup_context=save)

        @functools.wraps(definition)
        def run(*inputs: Tensor) -> Any:
            if inputs[0].is_cuda and _fits_blocks(inputs):
                return forward(*inputs)
            with torch.autocast(inputs[0].device.type, enabled=False):
                return definition(*inputs)

        return cast("Function", run)

    return define


def _fits_blocks(inputs: tuple[Tensor, ...]) -> bool:
    """Whether the Triton kernels are precise enough, and their blocks fit a multiprocessor."""
    if any(x.dtype == torch.float64 for x in inputs):
        return False
    exact = all(x.dtype == torch.float32 for x in inputs)
    return inputs[0].size(-1) <= (128 if exact else 256)


def grouped_rows(x: Tensor, memory: Tensor) -> Tensor:
    """Rows [N, H, L, ...] of all heads that read a memory [N, H_kv, ...], [N, H_kv, G · L, ...]."""
    return x.reshape(*memory.shape[:2], -1, x.size(3))


@operator("residual", lambda *inputs: torch.empty_like(inputs[1]), summand=1)
def residual_read(q: Tensor, local: Tensor, weight: Tensor, kv: Tensor) -> Tensor:
    """Read the memory, and add what it returns to the local attention: local + w ⊙ RMSNorm(φ(q) S).

    As `Rule.read`, where `weight` is w, [H, D], and `kv` is S, [N, H_kv, 2 D, D]. Where the memory
    is empty or `weight` is 0, the result is exactly `local`.
    """
    read = (grouped_rows(two_softmaxes(q), kv) @ kv).view_as(q)
    normed = functional.rms_norm(read, read.shape[-1:], eps=READ_EPSILON)
    return (local + weight.to(kv.dtype).unsqueeze(1) * normed).to(local.dtype)


@operator("residual", lambda k, _, scale: scale.new_empty(*k.shape[:2], 2 * k.size(3), k.size(3)))
def residual_sums(keys: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """Return what each segment writes: Σ β φ(k)ᵀ v, [N, H_kv, 2 D, D], in the memory's dtype.

    `keys` and `values` are [N, H_kv, L, D], of one dtype; `scale` is β, [N, H_kv, L], in the
    memory's dtype.
    """
    return two_softmaxes(keys).mT @ (values * scale.unsqueeze(-1))


@operator("shift", lambda *inputs: torch.empty_like(inputs[0]))
def shifted_keys(keys: Tensor, share: Tensor) -> Tensor:
    """Return lerp(k_t, k_{t−1}, μ_t) of `keys` [B, H_kv, T, D], of their shape and dtype.

    `share` is μ_t, [B, H_kv, T], of the same dtype; 0 for the first token, which keeps its own key.
    What autograd derives makes a dozen passes, each with a result as large as the keys.
    """
    before = torch.cat((keys[:, :, :1], keys[:, :, :-1]), dim=2)
    return torch.lerp(keys, before, share.unsqueeze(-1))
