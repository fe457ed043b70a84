"""The kernels of the residual memory, and their launch: `infini_model.model.kernels.memory_ops`.

For a row x with features a = softmax(c x) and b = softmax(−c x), and the two halves of a memory S:

    r = a S₁ + b S₂              y = r / rms(r)                 out = local + w ⊙ y
    dr = (w ⊙ d − y mean(w ⊙ d ⊙ y)) / rms(r)                   dw = Σ d ⊙ y
    dx = c (a ⊙ (dr S₁ᵀ − dr·(a S₁)) − b ⊙ (dr S₂ᵀ − dr·(b S₂)))    dS₁ = Σ aᵀ dr, dS₂ = Σ bᵀ dr

The last is what writes a memory, too: S₁ = Σ β aᵀ v. So three kernels do: one that reads, one that
writes, and one that goes back through what was read or written. The last two keep no more of a
memory at a time than a tile of its rows, which fits any multiprocessor.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from infini_model.model.kernels.memory_ops import READ_EPSILON, SHARPNESS
from infini_model.model.kernels.triton_launch import (
    kernel_constants,
    load_memory,
    load_rows,
    locate,
    memory_pointers,
    partition,
    row_contiguous,
    shared_memory,
    store_rows,
    with_strides,
)

_MINUS_INFINITY = tl.constexpr(-math.inf)
_EPSILON, _SHARPNESS = tl.constexpr(READ_EPSILON), tl.constexpr(SHARPNESS)
# Numbers of a memory that a program multiplies by at once.
_TILE = 4096


def residual_read_forward(q: Tensor, local: Tensor, weight: Tensor, kv: Tensor) -> Tensor:
    """As `residual_read`, for float32 with D at most 128, or 16 bits with D at most 256."""
    q, local = row_contiguous(q), row_contiguous(local)
    out = torch.empty_like(local)
    rows = (with_strides(x) for x in (q, local, out))
    _launch_rows(read_forward, q, kv, *rows, weight.contiguous())
    return out


def residual_read_backward(
    grad: Tensor, q: Tensor, weight: Tensor, kv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, weight and kv from that of the result of `residual_read_forward`."""
    grad, q = row_contiguous(grad), row_contiguous(q)
    dq = torch.empty_like(q)
    # float16 has not the range of these gradients.
    dread = torch.empty_like(q, dtype=None if q.dtype == torch.bfloat16 else torch.float32)
    blocks = triton.cdiv(q.size(2), row_constants(q, shared_memory(q))["ROWS"])
    dweight = kv.new_empty(*q.shape[:2], blocks, q.size(3))
    rows = (with_strides(x) for x in (q, grad, dq, dread))
    _launch_rows(read_backward, q, kv, *rows, weight.contiguous(), dweight)
    return dq, dweight.sum((0, 2)).to(weight.dtype), feature_sums(q, dread, None, kv.size(1))


def residual_sums_forward(keys: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """As `residual_sums`; see `residual_read_forward`."""
    keys, values = row_contiguous(keys), row_contiguous(values)
    return feature_sums(keys, values, scale.contiguous(), keys.size(1))


def residual_sums_backward(
    dkv: Tensor, keys: Tensor, values: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of keys, values and scale from that of the result."""
    keys, values, scale = row_contiguous(keys), row_contiguous(values), scale.contiguous()
    dkeys, dvalues, dscale = (torch.empty_like(x) for x in (keys, values, scale))
    rows = (with_strides(x) for x in (keys, values, dkeys, dvalues))
    _launch_rows(sums_backward, keys, dkv, *rows, scale, dscale)
    return dkeys, dvalues, dscale


def _launch_rows(kernel: triton.JITFunction, x: Tensor, kv: Tensor, *arguments: Any) -> None:
    """Run a kernel in a program for each block of the rows of `x` that read one memory."""
    heads, constants = kv.size(1), row_constants(x, shared_memory(x))
    group = x.size(1) // heads
    grid = (len(x) * heads, group * triton.cdiv(x.size(2), constants["ROWS"]))
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        kernel[grid](
            *arguments,
            kv.contiguous(),
            *(heads, group, x.size(2)),
            **constants,
            num_warps=4 if constants["WIDTH"] <= 64 else 8,
        )


def row_constants(x: Tensor, shared_memory: int) -> dict[str, Any]:
    """`kernel_constants` for the kernels that multiply by a memory in tiles of its rows."""
    constants = kernel_constants(x, shared_memory)
    return constants | {"TILE": min(constants["WIDTH"], _TILE // constants["WIDTH"])}


def feature_sums(x: Tensor, values: Tensor, scale: Tensor | None, heads: int) -> Tensor:
    """Σ β φ(x)ᵀ v over the rows that each of `heads` memories has; β is 1 without `scale`.

    `x` and `values` have contiguous rows. Returns [N, heads, 2 D, D], float32.
    """
    constants = kernel_constants(x, shared_memory(x))
    blocks_per_program, (memories, programs, tiles) = partition(x, heads, constants)
    width = x.size(3)
    kv = x.new_empty(programs, len(x), heads, 2 * width, width, dtype=torch.float32)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        sums_forward[memories, programs, 2 * tiles](
            *(with_strides(x), with_strides(values), scale, kv),
            *(heads, x.size(1) // heads, x.size(2), blocks_per_program),
            **constants,
            num_warps=8,
        )
    return kv[0] if programs == 1 else kv.sum(dim=0)


@triton.jit
def _statistics(
    rows: tl.tuple, at: tl.tuple, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
) -> tl.tensor:
    """What makes features of rows: largest and smallest number, and the inverses of both sums."""
    columns = tl.arange(0, WIDTH)
    within = (columns < HEAD_DIM)[None, :]
    x = load_rows(rows, at, columns, HEAD_DIM, ROWS).to(tl.float32) * _SHARPNESS
    largest = tl.max(tl.where(within, x, _MINUS_INFINITY), axis=1)[:, None]
    smallest = tl.min(tl.where(within, x, -_MINUS_INFINITY), axis=1)[:, None]
    a = tl.sum(tl.where(within, tl.exp(x - largest), 0.0), axis=1)[:, None]
    b = tl.sum(tl.where(within, tl.exp(smallest - x), 0.0), axis=1)[:, None]
    return largest, smallest, 1 / a, 1 / b


@triton.jit
def _features(
    rows: tl.tuple,
    at: tl.tuple,
    columns: tl.tensor,
    statistics: tl.tuple,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Some columns of both features, [ROWS, columns] float32; 0 beyond the head dimension."""
    largest, smallest, per_a, per_b = statistics
    within = (columns < HEAD_DIM)[None, :]
    x = load_rows(rows, at, columns, HEAD_DIM, ROWS).to(tl.float32) * _SHARPNESS
    a = tl.where(within, tl.exp(x - largest) * per_a, 0.0)
    return a, tl.where(within, tl.exp(smallest - x) * per_b, 0.0)


@triton.jit
def _read(
    rows: tl.tuple,
    at: tl.tuple,
    statistics: tl.tuple,
    kv: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """What the features of rows read from the two halves of a memory, [ROWS, WIDTH] each."""
    memory, values = tl.program_id(0), tl.arange(0, WIDTH)
    first = tl.zeros([ROWS, WIDTH], tl.float32)
    second = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in tl.range(0, WIDTH, TILE, num_stages=1):
        columns = start + tl.arange(0, TILE)
        a, b = _features(rows, at, columns, statistics, HEAD_DIM, ROWS)
        s = load_memory(kv, 2 * memory, columns, values, HEAD_DIM).to(OPERAND)
        first = tl.dot(a.to(OPERAND), s, first, PRECISION)
        s = load_memory(kv, 2 * memory + 1, columns, values, HEAD_DIM).to(OPERAND)
        second = tl.dot(b.to(OPERAND), s, second, PRECISION)
    return first, second


@triton.jit
def _store_through_features(
    rows: tl.tuple,
    drows: tl.tuple,
    at: tl.tuple,
    statistics: tl.tuple,
    kv: tl.tensor,
    d: tl.tensor,
    of_a: tl.tensor,
    of_b: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Write the gradient of rows, `d` [ROWS, WIDTH] being that of what they read.

    `of_a` and `of_b` are the sums of each half of the features times its gradient, [ROWS, 1].
    """
    memory, values = tl.program_id(0), tl.arange(0, WIDTH)
    for start in tl.range(0, WIDTH, TILE, num_stages=1):
        columns = start + tl.arange(0, TILE)
        a, b = _features(rows, at, columns, statistics, HEAD_DIM, ROWS)
        s = load_memory(kv, 2 * memory, columns, values, HEAD_DIM).to(OPERAND)
        da = tl.dot(d.to(OPERAND), tl.trans(s), input_precision=PRECISION)
        s = load_memory(kv, 2 * memory + 1, columns, values, HEAD_DIM).to(OPERAND)
        db = tl.dot(d.to(OPERAND), tl.trans(s), input_precision=PRECISION)
        dx = a * (da - of_a) - b * (db - of_b)
        store_rows(drows, at, columns, dx * _SHARPNESS, HEAD_DIM, ROWS)


@triton.jit
def _normed(first: tl.tensor, second: tl.tensor, HEAD_DIM: tl.constexpr) -> tl.tensor:
    """RMSNorm of the sum of two halves, and the inverse of its divisor, [ROWS, 1]."""
    read = first + second
    inverse = tl.rsqrt(tl.sum(read * read, axis=1)[:, None] / HEAD_DIM + _EPSILON)
    return read * inverse, inverse


@triton.jit
def read_forward(
    q: tl.tuple,
    local: tl.tuple,
    out: tl.tuple,
    weight: tl.tensor,
    kv: tl.tensor,
    kv_heads: tl.tensor,
    group: tl.tensor,
    length: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """A block of the rows of `out`."""
    at = locate(tl.program_id(1), tl.program_id(0), kv_heads, group, length, ROWS)
    statistics = _statistics(q, at, HEAD_DIM, WIDTH, ROWS)
    first, second = _read(q, at, statistics, kv, HEAD_DIM, WIDTH, TILE, ROWS, OPERAND, PRECISION)
    y, _ = _normed(first, second, HEAD_DIM)
    columns = tl.arange(0, WIDTH)
    w = tl.load(weight + at[1] * HEAD_DIM + columns, columns < HEAD_DIM, other=0.0)
    near = load_rows(local, at, columns, HEAD_DIM, ROWS).to(tl.float32)
    store_rows(out, at, columns, near + w.to(tl.float32)[None, :] * y, HEAD_DIM, ROWS)


@triton.jit
def read_backward(
    q: tl.tuple,
    grad: tl.tuple,
    dq: tl.tuple,
    dread: tl.tuple,
    weight: tl.tensor,
    dweight: tl.tensor,
    kv: tl.tensor,
    kv_heads: tl.tensor,
    group: tl.tensor,
    length: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """A block of the rows of `dq` and of the gradient of what was read, and its part of dw."""
    memory, block = tl.program_id(0), tl.program_id(1)
    at = locate(block, memory, kv_heads, group, length, ROWS)
    statistics = _statistics(q, at, HEAD_DIM, WIDTH, ROWS)
    first, second = _read(q, at, statistics, kv, HEAD_DIM, WIDTH, TILE, ROWS, OPERAND, PRECISION)
    y, inverse = _normed(first, second, HEAD_DIM)
    columns = tl.arange(0, WIDTH)
    within = columns < HEAD_DIM
    d = load_rows(grad, at, columns, HEAD_DIM, ROWS).to(tl.float32)
    partial = (memory * tl.num_programs(1) + block).to(tl.int64) * HEAD_DIM
    tl.store(dweight + partial + columns, tl.sum(d * y, axis=0), within)
    w = tl.load(weight + at[1] * HEAD_DIM + columns, within, other=0.0)
    d *= w.to(tl.float32)[None, :]
    d = (d - y * (tl.sum(d * y, axis=1)[:, None] / HEAD_DIM)) * inverse
    store_rows(dread, at, columns, d, HEAD_DIM, ROWS)
    of_a, of_b = tl.sum(d * first, axis=1)[:, None], tl.sum(d * second, axis=1)[:, None]
    # fmt: off
    _store_through_features(
        q, dq, at, statistics, kv, d, of_a, of_b,
        HEAD_DIM, WIDTH, TILE, ROWS, OPERAND, PRECISION,
    )
    # fmt: on


@triton.jit
def sums_forward(
    x: tl.tuple,
    values: tl.tuple,
    scale: tl.tensor | None,
    kv: tl.tensor,
    kv_heads: tl.tensor,
    group: tl.tensor,
    length: tl.tensor,
    blocks_per_program: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """The sums over some blocks of the rows of one memory: a tile of the columns of one half."""
    memory, all_columns = tl.program_id(0), tl.arange(0, WIDTH)
    half = tl.program_id(2) % 2
    columns = tl.program_id(2) // 2 * TILE + tl.arange(0, TILE)
    s = tl.zeros([WIDTH, TILE], tl.float32)
    first = tl.program_id(1) * blocks_per_program
    last = min(first + blocks_per_program, group * tl.cdiv(length, ROWS))
    within = (all_columns < HEAD_DIM)[None, :]
    for block in tl.range(first, last, num_stages=2):
        at = locate(block, memory, kv_heads, group, length, ROWS)
        rows = load_rows(x, at, all_columns, HEAD_DIM, ROWS).to(tl.float32) * _SHARPNESS
        rows = tl.where(within, tl.where(half == 0, rows, -rows), _MINUS_INFINITY)
        f = tl.exp(rows - tl.max(rows, axis=1)[:, None])
        factor = 1 / tl.sum(f, axis=1)
        if scale is not None:
            rest = at[2] + tl.arange(0, ROWS)
            start = memory.to(tl.int64) * length
            factor *= tl.load(scale + start + rest, rest < length, other=0.0)
        v = load_rows(values, at, columns, HEAD_DIM, ROWS).to(OPERAND)
        s = tl.dot(tl.trans((f * factor[:, None]).to(OPERAND)), v, s, PRECISION)
    partial = tl.program_id(1) * tl.num_programs(0) + memory
    to, inside = memory_pointers(kv, 2 * partial + half, all_columns, columns, HEAD_DIM)
    tl.store(to, s, inside)


@triton.jit
def sums_backward(
    keys: tl.tuple,
    values: tl.tuple,
    dkeys: tl.tuple,
    dvalues: tl.tuple,
    scale: tl.tensor,
    dscale: tl.tensor,
    dkv: tl.tensor,
    kv_heads: tl.tensor,
    group: tl.tensor,
    length: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """A block of the rows of all gradients."""
    memory, columns = tl.program_id(0), tl.arange(0, WIDTH)
    at = locate(tl.program_id(1), memory, kv_heads, group, length, ROWS)
    statistics = _statistics(keys, at, HEAD_DIM, WIDTH, ROWS)
    first, second = _read(
        keys, at, statistics, dkv, HEAD_DIM, WIDTH, TILE, ROWS, OPERAND, PRECISION
    )
    rest = at[2] + tl.arange(0, ROWS)
    place = memory.to(tl.int64) * length + rest
    factor = tl.load(scale + place, rest < length, other=0.0)[:, None]
    v = load_rows(values, at, columns, HEAD_DIM, ROWS).to(tl.float32)
    store_rows(dvalues, at, columns, factor * (first + second), HEAD_DIM, ROWS)
    tl.store(dscale + place, tl.sum(v * (first + second), axis=1), rest < length)
    d = factor * v
    of_a, of_b = tl.sum(d * first, axis=1)[:, None], tl.sum(d * second, axis=1)[:, None]
    # fmt: off
    _store_through_features(
        keys, dkeys, at, statistics, dkv, d, of_a, of_b,
        HEAD_DIM, WIDTH, TILE, ROWS, OPERAND, PRECISION,
    )
    # fmt: on
