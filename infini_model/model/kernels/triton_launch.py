"""Launch the Triton kernels: what `infini_model.model.kernels.memory_ops` defines, on CUDA.

A program loops over some blocks of the rows of one key-value head and keeps its sums in registers.
The sums of several programs are added afterwards, always in the same order and never atomically:
the same arguments give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from infini_model.model.kernels.triton_read import read_backward, read_forward
from infini_model.model.kernels.triton_write import sums_backward, sums_forward

# Of an H100 or H200; on other devices only the speed differs.
MULTIPROCESSORS = 132


def gated_read_forward(
    q: Tensor,
    local: Tensor,
    gate: Tensor,
    kv: Tensor,
    norm: Tensor,
    *,
    multiprocessors: int = MULTIPROCESSORS,
) -> Tensor:
    """Read the memory and mix it with the local attention (equations 7 and 10).

    Args:
        q: Queries without rotary embedding, [N, H, L, D]; float32 with D at most 128, or bfloat16
            or float16 with D at most 256.
        local: Local attention, [N, H, L, D], of the dtype of `q`.
        gate: [H], before the sigmoid.
        kv: Memory [N, H_kv, D, D], float32; query head h reads key-value head h // (H / H_kv).
        norm: Its normaliser [N, H_kv, D], float32.
        multiprocessors: Of the device; decides how the rows are divided among programs.

    Returns:
        [N, H, L, D] in the dtype of `local`, and with its strides if these are dense.
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
    """The gradients of `gated_read_forward` from that of its result.

    Args:
        grad: Gradient of the result, [N, H, L, D], in the dtype of `local`.
        q: This and the following are the arguments of `gated_read_forward`.
        local: See there.
        gate: See there.
        kv: See there.
        norm: See there.
        multiprocessors: See there.

    Returns:
        The gradients of q, local, gate, kv and norm, in the shape and dtype of each.
    """
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


def key_value_sums_forward(
    keys: Tensor, values: Tensor, *, multiprocessors: int = MULTIPROCESSORS
) -> tuple[Tensor, Tensor]:
    """Sum what each segment writes to the memory (equation 8): σ(K)ᵀV and Σσ(K).

    Args:
        keys: [N, H_kv, L, D]; float32 with D at most 128, or bfloat16 or float16 with D at most
            256.
        values: Of the shape and dtype of `keys`.
        multiprocessors: Of the device; decides how the rows are divided among programs.

    Returns:
        [N, H_kv, D, D] and [N, H_kv, D], float32.
    """
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
    """The gradients of `key_value_sums_forward` from those of its results.

    Args:
        dkv: Gradient of the first result, [N, H_kv, D, D], float32.
        dnorm: Gradient of the second, [N, H_kv, D], float32.
        keys: This and the following are the arguments of `key_value_sums_forward`.
        values: See there.
        multiprocessors: See there.

    Returns:
        The gradients of keys and values, in the dtype of each and with its strides if these are
        dense.
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


def sum_partials(partial: Tensor) -> Tensor:
    """The total of the sums [P, ...] of P programs; no copy if P is 1."""
    return partial[0] if len(partial) == 1 else partial.sum(dim=0)


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
    x: Tensor, kv_heads: int, constants: dict[str, Any], multiprocessors: int
) -> tuple[int, tuple[int, int, int]]:
    """The number of blocks of rows of `x` per program, and the grid of programs.

    Programs run in waves, one per multiprocessor. Loading the memory and storing its gradient takes
    a program about as long as two blocks do.
    """
    heads = x.size(0) * kv_heads
    blocks = x.size(1) // kv_heads * triton.cdiv(x.size(2), constants["ROWS"])

    def cost(programs_per_head: int) -> int:
        waves: int = triton.cdiv(heads * programs_per_head, multiprocessors)
        longest: int = triton.cdiv(blocks, programs_per_head)
        return waves * (longest + 2)

    programs_per_head = min(range(1, min(blocks, multiprocessors) + 1), key=cost)
    blocks_per_program: int = triton.cdiv(blocks, programs_per_head)
    columns = triton.cdiv(constants["HEAD_DIM"], constants["TILE"])
    return blocks_per_program, (heads, triton.cdiv(blocks, blocks_per_program), columns)
