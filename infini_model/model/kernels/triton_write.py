"""Kernels that sum what each segment writes to the memory, forward and backward.

For the rows k and v of a key-value head, with f = σ(k) ("Leave No Context Behind", arXiv
2404.07143, equation 8):

    M = Σ fᵀ v                   z = Σ f
    dk = (v dMᵀ + dz) min(f, 1)  dv = f dM

The backward pass recomputes f; nothing is saved but the arguments.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from infini_model.model.kernels.triton_launch import (
    MULTIPROCESSORS,
    features,
    kernel_constants,
    load_memory,
    load_rows,
    locate,
    partition,
    row_contiguous,
    shared_memory,
    store_memory,
    store_rows,
    sum_partials,
    with_strides,
)

_MINUS_INFINITY = tl.constexpr(-math.inf)


def key_value_sums_forward(
    keys: Tensor, values: Tensor, *, multiprocessors: int = MULTIPROCESSORS
) -> tuple[Tensor, Tensor]:
    """As `memory_ops.key_value_sums`; dtypes and `multiprocessors` as in `gated_read_forward`."""
    keys, values = row_contiguous(keys), row_contiguous(values)
    heads, head_dim = keys.size(1), keys.size(3)
    constants = kernel_constants(keys, shared_memory(keys))
    blocks_per_program, grid = partition(keys, heads, constants, multiprocessors)
    norm = keys.new_empty(grid[1], *keys.shape[:2], head_dim, dtype=torch.float32)
    kv = norm.new_empty(*norm.shape, head_dim)
    with torch.cuda.device_of(keys):  # type: ignore[no-untyped-call]
        sums_forward[grid](
            *(with_strides(keys), with_strides(values), kv, norm),
            *(heads, keys.size(2), blocks_per_program),
            **constants,
            num_warps=8,
        )
    return sum_partials(kv), sum_partials(norm)


def key_value_sums_backward(
    dkv: Tensor,
    dnorm: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    multiprocessors: int = MULTIPROCESSORS,
) -> tuple[Tensor, Tensor]:
    """The gradients of keys and values from those of both results, in the dtype of each.

    They have its strides if these are dense.
    """
    keys, values = row_contiguous(keys), row_contiguous(values)
    dkeys, dvalues = torch.empty_like(keys), torch.empty_like(values)
    constants = kernel_constants(keys, shared_memory(keys))
    blocks_per_program, grid = partition(keys, keys.size(1), constants, multiprocessors)
    with torch.cuda.device_of(keys):  # type: ignore[no-untyped-call]
        sums_backward[grid](
            *(dkv.contiguous(), dnorm.contiguous(), with_strides(keys), with_strides(values)),
            *(with_strides(dkeys), with_strides(dvalues)),
            *(keys.size(1), keys.size(2), blocks_per_program),
            **constants,
            num_warps=8,
        )
    return dkeys, dvalues


@triton.jit
def sums_forward(
    keys: tl.tuple,
    values: tl.tuple,
    kv: tl.tensor,
    norm: tl.tensor,
    kv_heads: tl.tensor,
    length: tl.tensor,
    blocks_per_program: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """The sums over some blocks of the rows of one head.

    Each program computes a tile of the columns of `kv`; that of the first tile also `norm`.
    """
    memory, all_columns = tl.program_id(0), tl.arange(0, WIDTH)
    tile = 0 if TILE == WIDTH else tl.program_id(2)
    columns = tile * TILE + tl.arange(0, TILE)
    m = tl.zeros([WIDTH, TILE], tl.float32)
    # Summed over the rows at the end: until then no thread needs another's values.
    z = tl.zeros([ROWS, WIDTH], tl.float32)
    first = tl.program_id(1) * blocks_per_program
    last = min(first + blocks_per_program, tl.cdiv(length, ROWS))
    for block in tl.range(first, last, num_stages=3):
        at = locate(block, memory, kv_heads, 1, length, ROWS)
        # σ(−∞) = 0: rows after the last add nothing.
        f = features(load_rows(keys, at, all_columns, HEAD_DIM, ROWS, _MINUS_INFINITY))
        v = load_rows(values, at, columns, HEAD_DIM, ROWS)
        m = tl.dot(tl.trans(f.to(OPERAND)), v.to(OPERAND), m, PRECISION)
        z += f

    partial = tl.program_id(1) * tl.num_programs(0) + memory
    store_memory(kv, partial, all_columns, columns, m, HEAD_DIM)
    if tile == 0:
        tl.store(norm + partial * HEAD_DIM + all_columns, tl.sum(z, axis=0), all_columns < HEAD_DIM)


@triton.jit
def sums_backward(
    dkv: tl.tensor,
    dnorm: tl.tensor,
    keys: tl.tuple,
    values: tl.tuple,
    dkeys: tl.tuple,
    dvalues: tl.tuple,
    kv_heads: tl.tensor,
    length: tl.tensor,
    blocks_per_program: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """A tile of the columns of `dkeys` and `dvalues`, for some blocks of the rows of one head."""
    memory, all_columns = tl.program_id(0), tl.arange(0, WIDTH)
    columns = (0 if TILE == WIDTH else tl.program_id(2) * TILE) + tl.arange(0, TILE)
    dm = load_memory(dkv, memory, all_columns, columns, HEAD_DIM).to(OPERAND)
    # Transposed outside the loop, it stays in shared memory.
    dm_t = tl.trans(load_memory(dkv, memory, columns, all_columns, HEAD_DIM).to(OPERAND))
    dz = tl.load(dnorm + memory * HEAD_DIM + columns, columns < HEAD_DIM, other=0.0)
    first = tl.program_id(1) * blocks_per_program
    last = min(first + blocks_per_program, tl.cdiv(length, ROWS))
    for block in tl.range(first, last, num_stages=2):
        at = locate(block, memory, kv_heads, 1, length, ROWS)
        v = load_rows(values, at, all_columns, HEAD_DIM, ROWS).to(OPERAND)
        f = features(load_rows(keys, at, all_columns, HEAD_DIM, ROWS))
        slope = tl.minimum(features(load_rows(keys, at, columns, HEAD_DIM, ROWS)), 1.0)
        dk = (tl.dot(v, dm_t, input_precision=PRECISION) + dz[None, :]) * slope
        dv = tl.dot(f.to(OPERAND), dm, input_precision=PRECISION)
        store_rows(dkeys, at, columns, dk, HEAD_DIM, ROWS)
        store_rows(dvalues, at, columns, dv, HEAD_DIM, ROWS)
