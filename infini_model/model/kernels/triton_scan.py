"""The kernel of `infini_model.model.kernels.scan`, and its launch.

A program owns some elements of the states of one row, keeps their running sum in registers and
walks over the segments. The sums of the next segments are loaded meanwhile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a program: 16 bytes of float32 for each of the 128 threads of 4 warps.
BLOCK = 512


def exclusive_scan(
    added: Tensor,
    first: Tensor,
    reset: Tensor | None,
    kept: Tensor | None = None,
    *,
    reverse: bool = False,
) -> Tensor:
    """As `infini_model.model.kernels.scan`, for any floating-point dtype."""
    added, first = added.contiguous(), first.contiguous()
    reset, kept = (None if x is None else x.contiguous() for x in (reset, kept))
    states = first.new_empty(len(first), added.size(1) + 1, *first.shape[1:])
    rows, size = len(first), first[:1].numel()
    with torch.cuda.device_of(added):  # type: ignore[no-untyped-call]
        scan[triton.cdiv(size, BLOCK), rows](
            *(added, first, reset, kept, states),
            *(added.size(1), size, added.size(2)),
            REVERSE=reverse,
            BLOCK=BLOCK,
            num_warps=4,
            # The product is rounded before the sum, as on a CPU.
            enable_fp_fusion=False,
        )
    return states


@triton.jit
def scan(
    added: tl.tensor,
    first: tl.tensor,
    reset: tl.tensor | None,
    kept: tl.tensor | None,
    states: tl.tensor,
    segments: tl.tensor,
    size: tl.tensor,
    heads: tl.tensor,
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The states of some elements of one row, segment by segment."""
    # The offset of a row or a segment may exceed 32 bits in a long context.
    row = tl.program_id(1).to(tl.int64)
    elements = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = elements < size
    head = elements // (size // heads)
    state = tl.load(first + row * size + elements, within, other=0.0)
    border = row * (segments + 1) + (segments if REVERSE else 0)
    if reset is not None:
        state = tl.where(tl.load(reset + border), 0.0, state)
    tl.store(states + border * size + elements, state, within)
    for step in tl.range(segments, num_stages=4):
        segment = row * segments + (segments - 1 - step if REVERSE else step)
        border += -1 if REVERSE else 1
        if kept is not None:
            state *= tl.load(kept + segment * heads + head, within, other=0.0)
        state += tl.load(added + segment * size + elements, within, other=0.0)
        if reset is not None:
            # A select, not a product with 0: what precedes a reset may be infinite.
            state = tl.where(tl.load(reset + border), 0.0, state)
        tl.store(states + border * size + elements, state, within)
