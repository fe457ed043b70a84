"""The two passes over all tokens that the memory costs, forward and backward, by Triton.

They compute what `infini_model.model.kernels.memory_ops` defines ("Leave No Context Behind", arXiv
2404.07143, equations 7, 8 and 10), without its tensors of full width in between.

The read, for a row q of a query head with gate g, and the memory (M, z) of its key-value head:

    f = σ(q) = ELU(q) + 1        n = f·z        s = sigmoid(g)        w = s / n
    out = (1 − s) local + w f M

and out = local where n finds nothing; s and w are 0 there. With d the gradient of out, P = d Mᵀ:

    dw = f·P                     ds = dw / n − d·local                dn = −dw w / n
    df = w P + dn z              dq = df min(f, 1), as σ' = min(σ, 1)
    dlocal = (1 − s) d           dg = Σ ds s (1 − s)
    dM = Σ w fᵀ d                dz = Σ dn f

summed over the rows of all query heads that read M (dg: over the rows of its own). What a segment
writes, for its rows k and v of a key-value head, with f = σ(k):

    M = Σ fᵀ v                   z = Σ f
    dk = (v dMᵀ + dz) min(f, 1)  dv = f dM

f is computed anew in the backward pass; nothing is kept but the arguments.

A program holds the memory of one key-value head, or the gradient of that, and goes through a
stretch of the rows that belong to it, so that sums stay in registers. The sums of several stretches
are added afterwards, always in the same order, and nothing is added atomically: the same arguments
give the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from infini_model.model.kernels.numerics import EMPTY_MASS

# Of an H100 or H200; on other devices this costs speed alone.
_MULTIPROCESSORS = 132
_EMPTY_MASS = tl.constexpr(EMPTY_MASS)
_MINUS_INFINITY = tl.constexpr(-math.inf)


def gated_read_forward(q: Tensor, local: Tensor, gate: Tensor, kv: Tensor, norm: Tensor) -> Tensor:
    """Read the memory and mix it with the local attention (equations 7 and 10).

    Args:
        q: Queries without rotary embedding, [N, H, L, D], D at most 256; float32, bfloat16 or
            float16.
        local: Local attention, [N, H, L, D], of the dtype of `q`.
        gate: [H], before the sigmoid.
        kv: Memory [N, H_kv, D, D], float32; query head h reads key-value head h // (H / H_kv).
        norm: Its normaliser [N, H_kv, D], float32.

    Returns:
        [N, H, L, D] in the dtype of `local`, and with its strides if these are dense.
    """
    q, local = _rows(q), _rows(local)
    out = torch.empty_like(local)
    tiles = _tiles(q)
    stretch, grid = _work(q, norm.size(1), tiles)
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        _read_forward[grid](
            *(_placed(q), _placed(local), gate.contiguous(), kv.contiguous(), norm.contiguous()),
            _placed(out),
            *(norm.size(1), q.size(1) // norm.size(1), q.size(2), stretch),
            **tiles,
            num_warps=4 if tiles["ROWS"] == 64 else 8,
        )
    return out


def gated_read_backward(
    grad: Tensor, q: Tensor, local: Tensor, gate: Tensor, kv: Tensor, norm: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `gated_read_forward` from that of its result.

    Args:
        grad: Gradient of the result, [N, H, L, D], in the dtype of `local`.
        q: This and the following are the arguments of `gated_read_forward`.
        local: As there.
        gate: As there.
        kv: As there.
        norm: As there.

    Returns:
        The gradients of q, local, gate, kv and norm, in the shape and dtype of each.
    """
    grad, q, local = _rows(grad), _rows(q), _rows(local)
    dq, dlocal = torch.empty_like(q), torch.empty_like(local)
    tiles = _tiles(q)
    stretch, grid = _work(q, norm.size(1), tiles)
    dgate = norm.new_empty(grid[2], *q.shape[:2], triton.cdiv(q.size(2), tiles["ROWS"]))
    dkv, dnorm = (x.new_empty(grid[1], *x.shape) for x in (kv, norm))
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        _read_backward[grid](
            _placed(grad),
            *(_placed(q), _placed(local), gate.contiguous(), kv.contiguous(), norm.contiguous()),
            *(_placed(dq), _placed(dlocal), dgate, dkv, dnorm),
            *(norm.size(1), q.size(1) // norm.size(1), q.size(2), stretch),
            **tiles,
            num_warps=4 if tiles["WIDTH"] <= 64 else 8,
        )
    dgate = dgate.sum(dim=(0, 1, 3)).to(gate.dtype)
    return dq, dlocal, dgate, _added(dkv), _added(dnorm)


def key_value_sums_forward(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Sum what each segment writes to the memory (equation 8): σ(K)ᵀV and Σσ(K).

    Args:
        keys: [N, H_kv, L, D], D at most 256; float32, bfloat16 or float16.
        values: Of the shape and dtype of `keys`.

    Returns:
        [N, H_kv, D, D] and [N, H_kv, D], float32.
    """
    keys, values = _rows(keys), _rows(values)
    heads, head_dim = keys.size(1), keys.size(3)
    tiles = _tiles(keys)
    stretch, grid = _work(keys, heads, tiles)
    norm = keys.new_empty(grid[1], *keys.shape[:2], head_dim, dtype=torch.float32)
    kv = norm.new_empty(*norm.shape, head_dim)
    with torch.cuda.device_of(keys):  # type: ignore[no-untyped-call]
        _sums_forward[grid](
            *(_placed(keys), _placed(values), kv, norm),
            *(heads, keys.size(2), stretch),
            **tiles,
            num_warps=8,
        )
    return _added(kv), _added(norm)


def key_value_sums_backward(
    dkv: Tensor, dnorm: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of `key_value_sums_forward` from those of its results.

    Args:
        dkv: Gradient of the first result, [N, H_kv, D, D], float32.
        dnorm: Gradient of the second, [N, H_kv, D], float32.
        keys: This and the following are the arguments of `key_value_sums_forward`.
        values: As there.

    Returns:
        The gradients of keys and values, in the dtype of each and with its strides if these are
        dense.
    """
    keys, values = _rows(keys), _rows(values)
    dkeys, dvalues = torch.empty_like(keys), torch.empty_like(values)
    tiles = _tiles(keys)
    stretch, grid = _work(keys, keys.size(1), tiles)
    with torch.cuda.device_of(keys):  # type: ignore[no-untyped-call]
        _sums_backward[grid](
            *(dkv.contiguous(), dnorm.contiguous(), _placed(keys), _placed(values)),
            *(_placed(dkeys), _placed(dvalues)),
            *(keys.size(1), keys.size(2), stretch),
            **tiles,
            num_warps=8,
        )
    return dkeys, dvalues


def _added(partial: Tensor) -> Tensor:
    """The sums of all stretches [stretches, ...] as one; one is that already, without a copy."""
    return partial[0] if len(partial) == 1 else partial.sum(dim=0)


def _rows(x: Tensor) -> Tensor:
    """`x` with the numbers of a row beside one another, as the kernels take them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _placed(x: Tensor) -> tuple[Tensor | int, ...]:
    """`x` and the strides by which `_block` finds its rows."""
    return (x, *x.stride()[:3])


def _tiles(x: Tensor) -> dict[str, Any]:
    """The constants of all kernels for rows like those of `x`.

    bfloat16 has the range of the memory's float32, and the tensor cores take it as it is. float16
    has not: its products are of TensorFloat-32, which has the range of the one and the mantissa of
    the other. For float32 three of these make one product, exact to about 22 bits.
    """
    width = max(16, triton.next_power_of_2(x.size(3)))
    size = x.element_size()
    return {
        "HEAD_DIM": x.size(3),
        "WIDTH": width,
        # More of the memory and its gradient does not fit into a multiprocessor.
        "TILE": min(width, (32 << 10) // (width * size)),
        "ROWS": 64 if size == 2 and width <= 128 else 32,
        "OPERAND": tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float32,
        "PRECISION": "tf32x3" if x.dtype == torch.float32 else "tf32",
        "enable_fp_fusion": True,
    }


def _work(x: Tensor, kv_heads: int, tiles: dict[str, Any]) -> tuple[int, tuple[int, int, int]]:
    """How many blocks of rows of `x` a program goes through, and the grid of the programs.

    Programs run in waves of one a multiprocessor. To load the memory and to store its gradient
    takes a program about as long as two blocks do.
    """
    heads = x.size(0) * kv_heads
    blocks = x.size(1) // kv_heads * triton.cdiv(x.size(2), tiles["ROWS"])

    def cost(stretches: int) -> int:
        waves: int = triton.cdiv(heads * stretches, _MULTIPROCESSORS)
        longest: int = triton.cdiv(blocks, stretches)
        return waves * (longest + 2)

    stretch: int = triton.cdiv(blocks, min(range(1, min(blocks, _MULTIPROCESSORS) + 1), key=cost))
    columns = triton.cdiv(tiles["HEAD_DIM"], tiles["TILE"])
    return stretch, (heads, triton.cdiv(blocks, stretch), columns)


@triton.jit
def _block(
    placed: tl.tuple, at: tl.tuple, columns: tl.tensor, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr
) -> tl.tensor:
    """Pointers to the columns of a block of rows, and which of them lead into the tensor."""
    tensor, of_n, of_head, of_row = placed
    n, head, first, length = at
    rows = tl.arange(0, ROWS)
    # A long context has more numbers than 32 bits count, a block has not.
    start = n.to(tl.int64) * of_n + head.to(tl.int64) * of_head + first.to(tl.int64) * of_row
    within = (first + rows < length)[:, None] & (columns < HEAD_DIM)[None, :]
    return tensor + start + rows[:, None] * of_row + columns[None, :], within


@triton.jit
def _load(
    placed: tl.tuple,
    at: tl.tuple,
    columns: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    OUTSIDE: tl.constexpr = 0.0,
) -> tl.tensor:
    pointers, within = _block(placed, at, columns, HEAD_DIM, ROWS)
    return tl.load(pointers, within, other=OUTSIDE)


@triton.jit
def _store(
    placed: tl.tuple,
    at: tl.tuple,
    columns: tl.tensor,
    x: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    pointers, within = _block(placed, at, columns, HEAD_DIM, ROWS)
    tl.store(pointers, x, within)


@triton.jit
def _at(
    block: tl.tensor,
    memory: tl.tensor,
    kv_heads: tl.tensor,
    group: tl.tensor,
    length: tl.tensor,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Where a block of those that belong to a memory starts, as `_block` takes it."""
    of_head = tl.cdiv(length, ROWS)
    head = memory % kv_heads * group + block // of_head
    return memory // kv_heads, head, block % of_head * ROWS, length


@triton.jit
def _square(
    kv: tl.tensor, index: tl.tensor, keys: tl.tensor, values: tl.tensor, HEAD_DIM: tl.constexpr
) -> tl.tensor:
    """Pointers to the columns `values` of memory `index`, and which of them lead into it."""
    start = index.to(tl.int64) * HEAD_DIM * HEAD_DIM
    within = (keys < HEAD_DIM)[:, None] & (values < HEAD_DIM)[None, :]
    return kv + start + keys[:, None] * HEAD_DIM + values[None, :], within


@triton.jit
def _held(
    kv: tl.tensor, index: tl.tensor, keys: tl.tensor, values: tl.tensor, HEAD_DIM: tl.constexpr
) -> tl.tensor:
    pointers, within = _square(kv, index, keys, values, HEAD_DIM)
    return tl.load(pointers, within, other=0.0)


@triton.jit
def _features(x: tl.tensor) -> tl.tensor:
    """σ = ELU + 1, which keeps all digits where exp(x) is small, and a NaN."""
    x = x.to(tl.float32)
    return tl.where(x > 0, x + 1, tl.exp(x))


@triton.jit
def _pair(x: tl.tensor, OPERAND: tl.constexpr) -> tl.tensor:
    """`x` [WIDTH] as columns of an operand [WIDTH, 16]: rounded, what that cut off, and zeros.

    The tensor cores sum with it, where a sum of the features would have them computed twice, once
    as they lie for the sum and once as they lie for the product.
    """
    x = x[:, None]
    rounded = x.to(OPERAND)
    rest = (x - rounded.to(tl.float32)).to(OPERAND)
    column = tl.arange(0, 16)[None, :]
    return tl.where(column == 0, rounded, tl.where(column == 1, rest, 0.0)).to(OPERAND)


@triton.jit
def _shares(total: tl.tensor, gate: tl.tensor) -> tl.tensor:
    """Whether a row finds something, 1 / n and s, from n: each [ROWS, 1]."""
    hit = total > _EMPTY_MASS
    return hit, 1 / tl.where(hit, total, 1.0), tl.where(hit, tl.sigmoid(gate.to(tl.float32)), 0.0)


@triton.jit
def _read_forward(
    q: tl.tuple,
    local: tl.tuple,
    gate: tl.tensor,
    kv: tl.tensor,
    norm: tl.tensor,
    out: tl.tuple,
    kv_heads: tl.tensor,
    group: tl.tensor,
    length: tl.tensor,
    stretch: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """A tile of the columns of `out`, for a stretch of the rows that read one memory."""
    memory, keys = tl.program_id(0), tl.arange(0, WIDTH)
    values = tl.program_id(2) * TILE + tl.arange(0, TILE)
    m = _held(kv, memory, keys, values, HEAD_DIM).to(OPERAND)
    z = tl.load(norm + memory * HEAD_DIM + keys, keys < HEAD_DIM, other=0.0)
    z_pair = _pair(z, OPERAND)
    first = tl.program_id(1) * stretch
    last = min(first + stretch, group * tl.cdiv(length, ROWS))
    for block in tl.range(first, last, num_stages=2):
        at = _at(block, memory, kv_heads, group, length, ROWS)
        f = _features(_load(q, at, keys, HEAD_DIM, ROWS)).to(OPERAND)
        total = tl.sum(tl.dot(f, z_pair, input_precision=PRECISION), axis=1)[:, None]
        hit, per_n, s = _shares(total, tl.load(gate + at[1]))
        found = tl.dot(f, m, input_precision=PRECISION)
        near = _load(local, at, values, HEAD_DIM, ROWS)
        mixed = (1 - s) * near.to(tl.float32) + s * per_n * found
        _store(out, at, values, tl.where(hit, mixed.to(near.dtype), near), HEAD_DIM, ROWS)


@triton.jit
def _read_backward(
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
    stretch: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """All gradients of a stretch of the rows that read one memory.

    A program sees to a tile of the columns of `dlocal` and `dkv`; that of the first tile to `dq`
    and `dnorm` as well, which need the whole of P.
    """
    memory, keys = tl.program_id(0), tl.arange(0, WIDTH)
    tile = 0 if TILE == WIDTH else tl.program_id(2)
    values = tile * TILE + tl.arange(0, TILE)
    # Transposed here and not where it is used, it stays in shared memory.
    m_t = tl.trans(_held(kv, memory, keys, values, HEAD_DIM).to(OPERAND))
    z = tl.load(norm + memory * HEAD_DIM + keys, keys < HEAD_DIM, other=0.0)
    dm = tl.zeros([WIDTH, TILE], tl.float32)
    # Added up over the rows r and r + 8, which one thread holds of a product, and the rest at last.
    dz = tl.zeros([ROWS // 16, 8, WIDTH], tl.float32)
    first, blocks = tl.program_id(1) * stretch, group * tl.cdiv(length, ROWS)
    for block in tl.range(first, min(first + stretch, blocks), num_stages=2):
        at = _at(block, memory, kv_heads, group, length, ROWS)
        d = _load(grad, at, values, HEAD_DIM, ROWS)
        near = _load(local, at, values, HEAD_DIM, ROWS)
        f = _features(_load(q, at, keys, HEAD_DIM, ROWS))
        _, per_n, s = _shares(tl.sum(f * z[None, :], axis=1)[:, None], tl.load(gate + at[1]))
        w = s * per_n
        _store(dlocal, at, values, (1 - s) * d.to(tl.float32), HEAD_DIM, ROWS)
        ds = -tl.sum(d.to(tl.float32) * near.to(tl.float32), axis=1)[:, None]
        dm = tl.dot(tl.trans((w * f).to(OPERAND)), d.to(OPERAND), dm, PRECISION)
        if tile == 0:
            p = tl.dot(d.to(OPERAND), m_t, input_precision=PRECISION)
            for other in tl.range(TILE, WIDTH, TILE, num_stages=1):
                d_other = _load(grad, at, other + values, HEAD_DIM, ROWS).to(OPERAND)
                m_other = _held(kv, memory, keys, other + values, HEAD_DIM).to(OPERAND)
                p = tl.dot(d_other, tl.trans(m_other), p, PRECISION)
            dw = tl.sum(f * p, axis=1)[:, None]
            ds += dw * per_n
            dn = -dw * w * per_n
            dq_block = (w * p + dn * z[None, :]) * tl.minimum(f, 1.0)
            _store(dq, at, keys, dq_block, HEAD_DIM, ROWS)
            dz += tl.sum(tl.reshape(dn * f, [ROWS // 16, 2, 8, WIDTH]), axis=1)
        # Where nothing is found s is 0, and so is the row's part of the sum.
        partial = (tile * tl.num_programs(0) + memory) * blocks + block
        tl.store(dgate + partial, tl.sum(ds * s * (1 - s)))

    partial = tl.program_id(1) * tl.num_programs(0) + memory
    pointers, within = _square(dkv, partial, keys, values, HEAD_DIM)
    tl.store(pointers, dm, within)
    if tile == 0:
        dz_sum = tl.sum(tl.sum(dz, axis=0), axis=0)
        tl.store(dnorm + partial * HEAD_DIM + keys, dz_sum, keys < HEAD_DIM)


@triton.jit
def _sums_forward(
    keys: tl.tuple,
    values: tl.tuple,
    kv: tl.tensor,
    norm: tl.tensor,
    kv_heads: tl.tensor,
    length: tl.tensor,
    stretch: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """The sums over a stretch of the rows of one head.

    A program sees to a tile of the columns of `kv`; that of the first tile to `norm` as well.
    """
    memory, whole = tl.program_id(0), tl.arange(0, WIDTH)
    tile = 0 if TILE == WIDTH else tl.program_id(2)
    columns = tile * TILE + tl.arange(0, TILE)
    m = tl.zeros([WIDTH, TILE], tl.float32)
    # Across the rows it is added up at last: until then no thread needs what another holds.
    z = tl.zeros([ROWS, WIDTH], tl.float32)
    first = tl.program_id(1) * stretch
    for block in tl.range(first, min(first + stretch, tl.cdiv(length, ROWS)), num_stages=3):
        at = _at(block, memory, kv_heads, 1, length, ROWS)
        # σ(−∞) = 0: rows behind the last add nothing.
        f = _features(_load(keys, at, whole, HEAD_DIM, ROWS, _MINUS_INFINITY))
        v = _load(values, at, columns, HEAD_DIM, ROWS)
        m = tl.dot(tl.trans(f.to(OPERAND)), v.to(OPERAND), m, PRECISION)
        z += f

    partial = tl.program_id(1) * tl.num_programs(0) + memory
    pointers, within = _square(kv, partial, whole, columns, HEAD_DIM)
    tl.store(pointers, m, within)
    if tile == 0:
        tl.store(norm + partial * HEAD_DIM + whole, tl.sum(z, axis=0), whole < HEAD_DIM)


@triton.jit
def _sums_backward(
    dkv: tl.tensor,
    dnorm: tl.tensor,
    keys: tl.tuple,
    values: tl.tuple,
    dkeys: tl.tuple,
    dvalues: tl.tuple,
    kv_heads: tl.tensor,
    length: tl.tensor,
    stretch: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """A tile of the columns of `dkeys` and `dvalues`, for a stretch of the rows of one head."""
    memory, whole = tl.program_id(0), tl.arange(0, WIDTH)
    columns = (0 if TILE == WIDTH else tl.program_id(2) * TILE) + tl.arange(0, TILE)
    dm = _held(dkv, memory, whole, columns, HEAD_DIM).to(OPERAND)
    # Transposed here and not where it is used, it stays in shared memory.
    dm_t = tl.trans(_held(dkv, memory, columns, whole, HEAD_DIM).to(OPERAND))
    dz = tl.load(dnorm + memory * HEAD_DIM + columns, columns < HEAD_DIM, other=0.0)
    first = tl.program_id(1) * stretch
    for block in tl.range(first, min(first + stretch, tl.cdiv(length, ROWS)), num_stages=2):
        at = _at(block, memory, kv_heads, 1, length, ROWS)
        v = _load(values, at, whole, HEAD_DIM, ROWS).to(OPERAND)
        f = _features(_load(keys, at, whole, HEAD_DIM, ROWS))
        slope = tl.minimum(_features(_load(keys, at, columns, HEAD_DIM, ROWS)), 1.0)
        dk = (tl.dot(v, dm_t, input_precision=PRECISION) + dz[None, :]) * slope
        dv = tl.dot(f.to(OPERAND), dm, input_precision=PRECISION)
        _store(dkeys, at, columns, dk, HEAD_DIM, ROWS)
        _store(dvalues, at, columns, dv, HEAD_DIM, ROWS)
