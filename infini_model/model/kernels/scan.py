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
) -> Tensor:
    """The state before each segment, and after the last, [B, N + 1, ...]: running sums.

    They start again, from zero, where `reset` is true; nothing older, not even NaN, gets past that.

    Args:
        added: What each of N segments adds, [B, N, ...].
        first: The state before all of them, [B, ...], of the dtype of `added`.
        reset: [B, N + 1] bool, true where the state at a border is emptied; None is never.
        kept: The factors by which each segment multiplies the state before it adds to it, [B, N,
            H], where H is the third dimension of `added`; None is 1.
        reverse: Whether the first to be added is the last segment, and `first` the state after it.
    """
    states = _empty(added, first)
    slots, segments = [*states.unbind(1)], [*range(added.size(1))]
    borders = [*range(len(slots))]
    if reverse:
        segments, borders = segments[::-1], borders[::-1]
    state = slots[borders[0]].copy_(first)
    for at, border in enumerate(borders):
        if at:
            segment, before, state = segments[at - 1], state, slots[border]
            if kept is not None:
                factors = kept[:, segment].view(*kept[:, segment].shape, *[1] * (first.dim() - 2))
                before = torch.mul(before, factors, out=state)
            torch.add(before, added[:, segment], out=state)
        if reset is not None:
            emptied = reset[:, border].view(-1, *[1] * (first.dim() - 1))
            state.masked_fill_(emptied, 0.0)
    return states


def _empty(added: Tensor, first: Tensor) -> Tensor:
    return first.new_empty(len(first), added.size(1) + 1, *first.shape[1:])


@exclusive_scan.register_kernel("cuda")
def _(*inputs: Any, reverse: bool = False) -> Tensor:
    from infini_model.model.kernels import triton_scan

    return triton_scan.exclusive_scan(*inputs, reverse=reverse)


exclusive_scan.register_fake(lambda added, first, *_, **__: _empty(added, first))


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Tensor) -> None:
    _, _, reset, kept = inputs
    ctx.save_for_backward(reset, kept, None if kept is None else output)
    ctx.reverse = keyword_only_inputs["reverse"]


def _gradients(ctx: Any, dstates: Tensor) -> tuple[Tensor | None, ...]:
    reset, kept, states = ctx.saved_tensors
    # Of each segment the border that it is added to, and that where its sum comes from.
    later, earlier = slice(1, None), slice(None, -1)
    to, source, start, end = (later, earlier, 0, -1)
    if ctx.reverse:
        to, source, start, end = source, to, end, start
    grads = exclusive_scan(
        dstates[:, source], dstates[:, end], reset, kept, reverse=not ctx.reverse
    )
    dkept = None
    if kept is not None:
        dkept = torch.linalg.vecdot(grads[:, to].flatten(3), states[:, source].flatten(3))
        if reset is not None:
            # What is emptied may have been infinite.
            dkept = dkept.masked_fill(reset[:, to].unsqueeze(-1), 0.0)
    return grads[:, to], grads[:, start], None, dkept


exclusive_scan.register_autograd(_gradients, setup_context=_save)
