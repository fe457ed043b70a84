"""Device functions shared by the kernels: load and store rows and memories, and compute σ.

A program holds the memory of one key-value head, or its gradient, and loops over blocks of that
memory's rows, which are the rows of all query heads that read it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_pointers(
    strided: tl.tuple, at: tl.tuple, columns: tl.tensor, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr
) -> tl.tensor:
    """Pointers to columns of a block of rows, and a mask of those inside the tensor."""
    tensor, of_n, of_head, of_row = strided
    n, head, first, length = at
    rows = tl.arange(0, ROWS)
    # The offset of a block may exceed 32 bits in a long context; offsets inside a block do not.
    start = n.to(tl.int64) * of_n + head.to(tl.int64) * of_head + first.to(tl.int64) * of_row
    within = (first + rows < length)[:, None] & (columns < HEAD_DIM)[None, :]
    return tensor + start + rows[:, None] * of_row + columns[None, :], within


@triton.jit
def load_rows(
    strided: tl.tuple,
    at: tl.tuple,
    columns: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    OUTSIDE: tl.constexpr = 0.0,
) -> tl.tensor:
    """The columns of a block of rows, [ROWS, columns]; `OUTSIDE` beyond the tensor."""
    pointers, within = row_pointers(strided, at, columns, HEAD_DIM, ROWS)
    return tl.load(pointers, within, other=OUTSIDE)


@triton.jit
def store_rows(
    strided: tl.tuple,
    at: tl.tuple,
    columns: tl.tensor,
    x: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Write `x` [ROWS, columns] to the columns of a block of rows."""
    pointers, within = row_pointers(strided, at, columns, HEAD_DIM, ROWS)
    tl.store(pointers, x, within)


@triton.jit
def locate(
    block: tl.tensor,
    memory: tl.tensor,
    kv_heads: tl.tensor,
    group: tl.tensor,
    length: tl.tensor,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """The position of a block of a memory's rows: segment, head, first row and segment length."""
    of_head = tl.cdiv(length, ROWS)
    head = memory % kv_heads * group + block // of_head
    return memory // kv_heads, head, block % of_head * ROWS, length


@triton.jit
def memory_pointers(
    kv: tl.tensor, index: tl.tensor, keys: tl.tensor, values: tl.tensor, HEAD_DIM: tl.constexpr
) -> tl.tensor:
    """Pointers to the columns `values` of memory `index`, and a mask of those inside it."""
    start = index.to(tl.int64) * HEAD_DIM * HEAD_DIM
    within = (keys < HEAD_DIM)[:, None] & (values < HEAD_DIM)[None, :]
    return kv + start + keys[:, None] * HEAD_DIM + values[None, :], within


@triton.jit
def load_memory(
    kv: tl.tensor, index: tl.tensor, keys: tl.tensor, values: tl.tensor, HEAD_DIM: tl.constexpr
) -> tl.tensor:
    """The columns `values` of memory `index`, [keys, values]; 0 beyond the head dimension."""
    pointers, within = memory_pointers(kv, index, keys, values, HEAD_DIM)
    return tl.load(pointers, within, other=0.0)


@triton.jit
def store_memory(
    kv: tl.tensor,
    index: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    x: tl.tensor,
    HEAD_DIM: tl.constexpr,
) -> None:
    """Write `x` [keys, values] to the columns `values` of memory `index`."""
    pointers, within = memory_pointers(kv, index, keys, values, HEAD_DIM)
    tl.store(pointers, x, within)


@triton.jit
def features(x: tl.tensor) -> tl.tensor:
    """σ = ELU + 1, without cancellation where exp(x) is small. Keeps NaN."""
    x = x.to(tl.float32)
    return tl.where(x > 0, x + 1, tl.exp(x))
