"""Kernels that read the memory and mix the result with the local attention, forward and backward.

For a row q of a query head with gate g, and the memory (M, z) of its key-value head ("Leave No
Context Behind", arXiv 2404.07143, equations 7 and 10):

    f = σ(q) = ELU(q) + 1        n = f·z        s = sigmoid(g)        w = s / n
    out = (1 − s) local + w f M

Where n is nearly 0, the memory is empty: s and w are 0 there, and out = local exactly. With d the
gradient of out and P = d Mᵀ:

    dw = f·P                     ds = dw / n − d·local                dn = −dw w / n
    df = w P + dn z              dq = df min(f, 1), as σ' = min(σ, 1)
    dlocal = (1 − s) d           dg = Σ ds s (1 − s)
    dM = Σ w fᵀ d                dz = Σ dn f

summed over the rows of all query heads that read M (dg: over the rows of its own head). The
backward pass recomputes f; nothing is saved but the arguments.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infini_model.model.kernels.memory_ops import EMPTY_MASS
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

_EMPTY_MASS = tl.constexpr(EMPTY_MASS)


def gated_read_forward(
    q: Tensor,
    local: Tensor,
    gate: Tensor,
    kv: Tensor,
    norm: Tensor,
    *,
    multiprocessors: int = MULTIPROCESSORS,
) -> Tensor:
    """As `memory_ops.gated_read`, for float32 with D at most 128, or 16 bits with D at most 256.

    The number of `multiprocessors` decides how the rows are divided among programs. The result has
    the strides of `local` if these are dense.
    """
    q, local = row_contiguous(q), row_contiguous(local)
    out = torch.empty_like(local)
    constants = kernel_constants(q, shared_memory(q))
    blocks_per_program, grid = partition(q, norm.size(1), constants, multiprocessors)
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        read_forward[grid](
            *(with_strides(q), with_strides(local)),
            *(gate.contiguous(), kv.contiguous(), norm.contiguous()),
            with_strides(out),
            *(norm.size(1), q.size(1) // norm.size(1), q.size(2), blocks_per_program),
            **constants,
            num_warps=4 if constants["ROWS"] == 64 else 8,
        )
    return out


def gated_read_backward(
    grad: Tensor,
    q: Tensor,
    local: Tensor,
    gate: Tensor,
    kv: Tensor,
    norm: Tensor,
    *,
    multiprocessors: int = MULTIPROCESSORS,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, local, gate, kv and norm from that of the result, in their dtypes."""
    grad, q, local = row_contiguous(grad), row_contiguous(q), row_contiguous(local)
    dq, dlocal = torch.empty_like(q), torch.empty_like(local)
    constants = kernel_constants(q, shared_memory(q))
    blocks_per_program, grid = partition(q, norm.size(1), constants, multiprocessors)
    dgate = norm.new_empty(grid[2], *q.shape[:2], triton.cdiv(q.size(2), constants["ROWS"]))
    dkv, dnorm = (x.new_empty(grid[1], *x.shape) for x in (kv, norm))
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        read_backward[grid](
            with_strides(grad),
            *(with_strides(q), with_strides(local)),
            *(gate.contiguous(), kv.contiguous(), norm.contiguous()),
            *(with_strides(dq), with_strides(dlocal), dgate, dkv, dnorm),
            *(norm.size(1), q.size(1) // norm.size(1), q.size(2), blocks_per_program),
            **constants,
            num_warps=4 if constants["WIDTH"] <= 64 else 8,
        )
    dgate = dgate.sum(dim=(0, 1, 3)).to(gate.dtype)
    return dq, dlocal, dgate, sum_partials(dkv), sum_partials(dnorm)


@triton.jit
def _split_columns(x: tl.tensor, OPERAND: tl.constexpr) -> tl.tensor:
    """`x` [WIDTH] as an operand [WIDTH, 16]: a column rounded, one of the remainder, and zeros.

    With it the tensor cores compute f·x. As a sum it would need the features in another layout, so
    they would be computed twice.
    """
    x = x[:, None]
    rounded = x.to(OPERAND)
    rest = (x - rounded.to(tl.float32)).to(OPERAND)
    column = tl.arange(0, 16)[None, :]
    return tl.where(column == 0, rounded, tl.where(column == 1, rest, 0.0)).to(OPERAND)


@triton.jit
def _read_weights(total: tl.tensor, gate: tl.tensor) -> tl.tensor:
    """Whether n is large enough to count, 1 / n and s; each [ROWS, 1]."""
    nonempty = total > _EMPTY_MASS
    inverse = 1 / tl.where(nonempty, total, 1.0)
    return nonempty, inverse, tl.where(nonempty, tl.sigmoid(gate.to(tl.float32)), 0.0)


@triton.jit
def read_forward(
    q: tl.tuple,
    local: tl.tuple,
    gate: tl.tensor,
    kv: tl.tensor,
    norm: tl.tensor,
    out: tl.tuple,
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
    """A tile of the columns of `out`, for some blocks of the rows that read one memory."""
    memory, keys = tl.program_id(0), tl.arange(0, WIDTH)
    values = tl.program_id(2) * TILE + tl.arange(0, TILE)
    m = load_memory(kv, memory, keys, values, HEAD_DIM).to(OPERAND)
    z = tl.load(norm + memory * HEAD_DIM + keys, keys < HEAD_DIM, other=0.0)
    z_columns = _split_columns(z, OPERAND)
    first = tl.program_id(1) * blocks_per_program
    last = min(first + blocks_per_program, group * tl.cdiv(length, ROWS))
    for block in tl.range(first, last, num_stages=2):
        at = locate(block, memory, kv_heads, group, length, ROWS)
        f = features(load_rows(q, at, keys, HEAD_DIM, ROWS)).to(OPERAND)
        total = tl.sum(tl.dot(f, z_columns, input_precision=PRECISION), axis=1)[:, None]
        nonempty, per_n, s = _read_weights(total, tl.load(gate + at[1]))
        product = tl.dot(f, m, input_precision=PRECISION)
        local_block = load_rows(local, at, values, HEAD_DIM, ROWS)
        mixed = (1 - s) * local_block.to(tl.float32) + s * per_n * product
        mixed = tl.where(nonempty, mixed.to(local_block.dtype), local_block)
        store_rows(out, at, values, mixed, HEAD_DIM, ROWS)


@triton.jit
def read_backward(
    grad: tl.tuple,
    q: tl.tuple,
    local: tl.tuple,
    gate: tl.tensor,
    kv: tl.tensor,
    norm: tl.tensor,
    dq: tl.tuple,
    dlocal: tl.tuple,
    dgate: tl.tensor,
    dkv: tl.tensor,
    dnorm: tl.tensor,
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
    """All gradients of some blocks of the rows that read one memory.

    Each program computes a tile of the columns of `dlocal` and `dkv`; that of the first tile also
    `dq` and `dnorm`, which need all of P. One loop computes everything, so that a block is loaded
    once: hence the length of this function, a third of which are arguments.
    """
    memory, keys = tl.program_id(0), tl.arange(0, WIDTH)
    tile = 0 if TILE == WIDTH else tl.program_id(2)
    values = tile * TILE + tl.arange(0, TILE)
    # Transposed outside the loop, it stays in shared memory.
    m_t = tl.trans(load_memory(kv, memory, keys, values, HEAD_DIM).to(OPERAND))
    z = tl.load(norm + memory * HEAD_DIM + keys, keys < HEAD_DIM, other=0.0)
    dm = tl.zeros([WIDTH, TILE], tl.float32)
    # The loop sums rows r and r + 8, which one thread holds; the other rows are summed at the end.
    dz = tl.zeros([ROWS // 16, 8, WIDTH], tl.float32)
    first, blocks = tl.program_id(1) * blocks_per_program, group * tl.cdiv(length, ROWS)
    last = min(first + blocks_per_program, blocks)
    for block in tl.range(first, last, num_stages=2):
        at = locate(block, memory, kv_heads, group, length, ROWS)
        d = load_rows(grad, at, values, HEAD_DIM, ROWS)
        local_block = load_rows(local, at, values, HEAD_DIM, ROWS)
        f = features(load_rows(q, at, keys, HEAD_DIM, ROWS))
        _, per_n, s = _read_weights(tl.sum(f * z[None, :], axis=1)[:, None], tl.load(gate + at[1]))
        w = s * per_n
        store_rows(dlocal, at, values, (1 - s) * d.to(tl.float32), HEAD_DIM, ROWS)
        ds = -tl.sum(d.to(tl.float32) * local_block.to(tl.float32), axis=1)[:, None]
        dm = tl.dot(tl.trans((w * f).to(OPERAND)), d.to(OPERAND), dm, PRECISION)
        if tile == 0:
            p = tl.dot(d.to(OPERAND), m_t, input_precision=PRECISION)
            for other in tl.range(TILE, WIDTH, TILE, num_stages=1):
                d_other = load_rows(grad, at, other + values, HEAD_DIM, ROWS).to(OPERAND)
                m_other = load_memory(kv, memory, keys, other + values, HEAD_DIM).to(OPERAND)
                p = tl.dot(d_other, tl.trans(m_other), p, PRECISION)
            dw = tl.sum(f * p, axis=1)[:, None]
            ds += dw * per_n
            dn = -dw * w * per_n
            dq_block = (w * p + dn * z[None, :]) * tl.minimum(f, 1.0)
            store_rows(dq, at, keys, dq_block, HEAD_DIM, ROWS)
            dz += tl.sum(tl.reshape(dn * f, [ROWS // 16, 2, 8, WIDTH]), axis=1)
        # Where the memory is empty, s is 0, and so is the row's part of the sum.
        partial = (tile * tl.num_programs(0) + memory) * blocks + block
        tl.store(dgate + partial, tl.sum(ds * s * (1 - s)))

    partial = tl.program_id(1) * tl.num_programs(0) + memory
    store_memory(dkv, partial, keys, values, dm, HEAD_DIM)
    if tile == 0:
        dz_sum = tl.sum(tl.sum(dz, axis=0), axis=0)
        tl.store(dnorm + partial * HEAD_DIM + keys, dz_sum, keys < HEAD_DIM)
