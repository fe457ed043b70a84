"""What the Triton kernels of the memory share: how rows are divided, and device functions.

A program holds the memory of one key-value head, or its gradient, and loops over some blocks of
that memory's rows, which are the rows of all query heads that read it. It keeps its sums in
registers. The sums of several programs are added afterwards, always in the same order and never
atomically: the same arguments give the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Of an H100 or H200; on other devices only the speed differs.
MULTIPROCESSORS = 132


def row_contiguous(x: Tensor) -> Tensor:
    """`x` with contiguous rows, which the kernels need; a copy only if necessary."""
    return x if x.stride(-1) == 1 else x.contiguous()


def with_strides(x: Tensor) -> tuple[Tensor | int, ...]:
    """`x` and the strides by which `row_pointers` finds its rows."""
    return (x, *x.stride()[:3])


def shared_memory(x: Tensor) -> int:
    """The bytes of shared memory that a block may have; in Triton's interpreter as on an H100."""
    if not x.is_cuda:
        return 227 << 10
    properties: Any = torch.cuda.get_device_properties(x.device)
    return int(properties.shared_memory_per_block_optin)


def kernel_constants(x: Tensor, shared_memory: int) -> dict[str, Any]:
    """The compile-time constants of all kernels, for rows like those of `x`.

    Larger blocks do not fit into the registers of a multiprocessor, nor into `shared_memory`, the
    bytes that a block may have on the GPU: 64 KiB on a T4, 99 on most cards for desktops, 163 on an
    A100, 227 on the GPUs whose tensor cores are made for 64 rows.

    bfloat16 has the range of the memory's float32, so it is multiplied as it is, where the blocks
    fit. float16 has not: it is multiplied in TensorFloat-32, which has the range of float32 and the
    mantissa of float16. A float32 product is made of three TensorFloat-32 products, exact to about
    22 bits.
    """
    width = max(16, triton.next_power_of_2(x.size(3)))
    narrow = x.dtype == torch.bfloat16 and shared_memory >= 99 << 10
    rows = 64 if shared_memory >= 227 << 10 else 32
    largest = (8 if shared_memory >= 163 << 10 else 4) << 10
    return {
        "HEAD_DIM": x.size(3),
        "WIDTH": width,
        "TILE": min(width, (16 << 10 if narrow else 4 << 10) // width),
        "ROWS": min(rows, largest // width) if narrow else 16,
        "OPERAND": tl.bfloat16 if narrow else tl.float32,
        "PRECISION": "tf32x3" if x.dtype == torch.float32 else "tf32",
        "enable_fp_fusion": True,
    }


def partition(
    x: Tensor, kv_heads: int, constants: dict[str, Any]
) -> tuple[int, tuple[int, int, int]]:
    """The number of blocks of rows of `x` per program, and the grid of programs.

    Programs run in waves, one per multiprocessor. Loading the memory and storing its gradient takes
    a program about as long as two blocks do.
    """
    heads = x.size(0) * kv_heads
    blocks = x.size(1) // kv_heads * triton.cdiv(x.size(2), constants["ROWS"])
    blocks_per_program = _blocks_per_program(heads, blocks, MULTIPROCESSORS)
    columns = triton.cdiv(constants["HEAD_DIM"], constants["TILE"])
    return blocks_per_program, (heads, triton.cdiv(blocks, blocks_per_program), columns)


@functools.lru_cache  # asked several times in every layer of every step
def _blocks_per_program(heads: int, blocks: int, multiprocessors: int) -> int:
    def cost(programs_per_head: int) -> int:
        waves: int = triton.cdiv(heads * programs_per_head, multiprocessors)
        longest: int = triton.cdiv(blocks, programs_per_head)
        return waves * (longest + 2)

    programs_per_head = min(range(1, min(blocks, multiprocessors) + 1), key=cost)
    blocks_per_program: int = triton.cdiv(blocks, programs_per_head)
    return blocks_per_program


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
    strided: tl.tuple, at: tl.tuple, columns: tl.tensor, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr
) -> tl.tensor:
    """The columns of a block of rows, [ROWS, columns]; 0 beyond the tensor."""
    pointers, within = row_pointers(strided, at, columns, HEAD_DIM, ROWS)
    return tl.load(pointers, within, other=0.0)


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
