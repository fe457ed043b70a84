"""The kernels of the key shift, and their launch: `infini_model.model.kernels.memory_ops`.

For token t of a head, with g the gradient of the result:

    out_t = k_t + μ_t (k_{t−1} − k_t)
    dk_t  = (1 − μ_t) g_t + μ_{t+1} g_{t+1}         dμ_t = g_t · (k_{t−1} − k_t)

A program computes a block of tokens. It reads their neighbours as well, from the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infini_model.model.kernels.triton_launch import row_contiguous, with_strides

# Numbers of a program: 16 for each of the 128 threads of 4 warps.
BLOCK = 2048


def shifted_keys_forward(keys: Tensor, share: Tensor) -> Tensor:
    """As `infini_model.model.kernels.memory_ops.shifted_keys`, for 16 or 32 bits."""
    keys = row_contiguous(keys)
    out = torch.empty_like(keys)
    _launch(shift_forward, (keys, out), share)
    return out


def shifted_keys_backward(grad: Tensor, keys: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `shifted_keys_forward` from that of its result."""
    grad, keys = row_contiguous(grad), row_contiguous(keys)
    dkeys, dshare = torch.empty_like(keys), torch.empty_like(share)
    _launch(shift_backward, (grad, keys, dkeys), share, dshare)
    return dkeys, dshare


def _launch(kernel: triton.JITFunction, rows: tuple[Tensor, ...], *shares: Tensor) -> None:
    """Run `kernel` on tensors [B, H, T, D] with contiguous rows, and on [B, H, T]."""
    batch, heads, tokens, head_dim = rows[0].shape
    width = triton.next_power_of_2(head_dim)
    rows_at_once = max(1, BLOCK // width)
    with torch.cuda.device_of(rows[0]):  # type: ignore[no-untyped-call]
        kernel[triton.cdiv(tokens, rows_at_once), heads, batch](
            *(with_strides(x) for x in (*rows, *shares)),
            tokens,
            HEAD_DIM=head_dim,
            WIDTH=width,
            ROWS=rows_at_once,
            num_warps=4,
            enable_fp_fusion=True,
        )


@triton.jit
def _pointers(strided: tl.tuple, tokens: tl.tensor) -> tl.tensor:
    """Pointers to what a tensor holds for some tokens of this program's head, as a column."""
    numbers, of_batch, of_head, of_token = strided
    start = tl.program_id(2).to(tl.int64) * of_batch + tl.program_id(1).to(tl.int64) * of_head
    return numbers + start + tokens[:, None] * of_token


@triton.jit
def shift_forward(
    keys: tl.tuple,
    out: tl.tuple,
    share: tl.tuple,
    length: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """The result for a block of tokens of one head."""
    # The offset of a token may exceed 32 bits in a long context.
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)[None, :]
    here = (tokens < length)[:, None]
    within = here & (columns < HEAD_DIM)
    current = tl.load(_pointers(keys, tokens) + columns, within, other=0.0).to(tl.float32)
    # The first token has no neighbour, and its share is 0.
    before = tl.maximum(tokens - 1, 0)
    previous = tl.load(_pointers(keys, before) + columns, within, other=0.0).to(tl.float32)
    shares = tl.load(_pointers(share, tokens), here, other=0.0).to(tl.float32)
    shifted = current + shares * (previous - current)
    tl.store(_pointers(out, tokens) + columns, shifted, within)


@triton.jit
def shift_backward(
    grad: tl.tuple,
    keys: tl.tuple,
    dkeys: tl.tuple,
    share: tl.tuple,
    dshare: tl.tuple,
    length: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Both gradients for a block of tokens of one head."""
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)[None, :]
    here, followed = (tokens < length)[:, None], (tokens + 1 < length)[:, None]
    within = here & (columns < HEAD_DIM)
    g = tl.load(_pointers(grad, tokens) + columns, within, other=0.0).to(tl.float32)
    after = followed & (columns < HEAD_DIM)
    next_g = tl.load(_pointers(grad, tokens + 1) + columns, after, other=0.0).to(tl.float32)
    shares = tl.load(_pointers(share, tokens), here, other=0.0).to(tl.float32)
    next_shares = tl.load(_pointers(share, tokens + 1), followed, other=0.0).to(tl.float32)
    dk = (1 - shares) * g + next_shares * next_g
    tl.store(_pointers(dkeys, tokens) + columns, dk, within)

    current = tl.load(_pointers(keys, tokens) + columns, within, other=0.0).to(tl.float32)
    before = tl.maximum(tokens - 1, 0)
    previous = tl.load(_pointers(keys, before) + columns, within, other=0.0).to(tl.float32)
    dshares = tl.sum(g * (previous - current), axis=1)[:, None]
    tl.store(_pointers(dshare, tokens), dshares, here)
