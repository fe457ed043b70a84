"""Running sums over the segments, which may decay: what the memory holds before each of them.

One custom operator, opaque to `torch.compile`, whose gradient is the same scan in the other
direction. On CUDA it is one Triton kernel. Each sum is read once and each state written once, and
always added in the order of the segments, so the same arguments give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("infini_model::exclusive_scan", mutates_args=())
def exclusive_scan(
    added: Tensor,
    first: Tensor,
    reset: Tensor | None,
    kept: Tensor | None = None,
    *,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Exclusive prefix sums that start again, from zero, where `reset` is true.

    Nothing from before a reset, not even NaN, gets past it.

    Args:
        added: What each of N segments adds, [B, N, ...].
        first: The state before all of them, [B, ...], of the dtype of `added`.
        reset: [B, N + 1] bool, true where the state before a segment, or after the last, is
            emptied; None is never.
        kept: The factors by which each segment multiplies the state before it adds to it, [B, N,
            H], where H is the third dimension of `added`; None is 1.
        reverse: Whether the first to be added is the last segment. Then `first` is the state
            after the last, and each state that after a segment.

    Returns:
        The state before each segment [B, N, ...], and that after the last [B, ...]; with
        `reverse` the state after each segment, and that before the first.
    """
    count = added.size(1)
    segments, borders = [*range(count)], [*range(count + 1)]
    if reverse:
        segments, borders = segments[::-1], borders[::-1]
    states, end = torch.empty_like(added), torch.empty_like(first)
    slots = [*(states[:, segment] for segment in segments), end]
    slots[0].copy_(first)
    for at, border in enumerate(borders):
        if at:
            segment, state = segments[at - 1], slots[at - 1]
            if kept is not None:
                factors = kept[:, segment].view(*kept[:, segment].shape, *[1] * (first.dim() - 2))
                state = torch.mul(state, factors, out=slots[at])
            torch.add(state, added[:, segment], out=slots[at])
        if reset is not None:
            emptied = reset[:, border].view(-1, *[1] * (first.dim() - 1))
            slots[at].masked_fill_(emptied, 0.0)
    return states, end


@exclusive_scan.register_kernel("cuda")
def _(
    added: Tensor,
    first: Tensor,
    reset: Tensor | None,
    kept: Tensor | None = None,
    *,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    from infini_model.model.kernels import triton_scan

    return triton_scan.exclusive_scan(added, first, reset, kept, reverse=reverse)


@exclusive_scan.register_fake
def _(
    added: Tensor,
    first: Tensor,
    reset: Tensor | None,  # noqa: ARG001
    kept: Tensor | None = None,  # noqa: ARG001
    *,
    reverse: bool = False,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(added), torch.empty_like(first)


def _save(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: tuple[Tensor, Tensor]
) -> None:
    _, _, reset, kept = inputs
    ctx.save_for_backward(reset, kept, None if kept is None else output[0])
    ctx.reverse = keyword_only_inputs["reverse"]


def _gradients(ctx: Any, dstates: Tensor, dend: Tensor) -> tuple[Tensor | None, ...]:
    reset, kept, states = ctx.saved_tensors
    dadded, dfirst = exclusive_scan(dstates, dend, reset, kept, reverse=not ctx.reverse)
    dkept = None
    if kept is not None:
        dkept = torch.linalg.vecdot(dadded.flatten(3), states.flatten(3))
        if reset is not None:
            # What is emptied may have been infinite.
            beyond = reset[:, :-1] if ctx.reverse else reset[:, 1:]
            dkept = dkept.masked_fill(beyond.unsqueeze(-1), 0.0)
    return dadded, dfirst, None, dkept


exclusive_scan.register_autograd(_gradients, setup_context=_save)
