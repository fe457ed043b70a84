"""Infini-attention ("Leave No Context Behind", arXiv 2404.07143), all segments at once.

A sequence is cut into segments. Each head attends exactly inside a segment, and reads everything
older from a memory (M, z) of constant size. With σ = ELU + 1, a segment of Q, K, V computes

    A_local = causal softmax(Q Kᵀ / √D) V                   attention inside the segment (eq. 2)
    A_mem   = σ(Q) M / σ(Q) z                               read the memory before it (eq. 7)
    out     = s · A_mem + (1 − s) · A_local                 s = sigmoid(gate) (eq. 10)
    M, z    ← M + σ(K)ᵀ V, z + Σ σ(K)                       then write to it (eq. 8)

or writes by a bounded form of the delta rule (eq. 9). Where the memory is empty, out = A_local.

The residual rule has sharper features φ(x) = [softmax(c x), softmax(−c x)], of width 2 D (Hedgehog,
arXiv 2402.04347), no normaliser, and adds what it reads, normed and with a learned weight w:

    out     = A_local + w ⊙ RMSNorm(φ(Q) S)
    S       ← e^g S + β φ(k)ᵀ v                             for each token of the segment

Two gates of each token say what is worth keeping: β, how much of its value it writes, and g ≤ 0, by
which it lets what is older fade (Gated DeltaNet, arXiv 2412.06464).

With w = 0, too, out = A_local exactly: so a pretrained Llama begins as the Llama that it was, cut
into segments.

With `causal=False` each position sees its whole segment, as masked diffusion needs (LLaDA, arXiv
2502.09992). `infini_model.model.definition` is the loop over segments in plain PyTorch.

A loop over segments keeps a GPU waiting: each step is small and depends on the last. But only the
memory is sequential, and under the linear rule it is a prefix sum of what the segments write. So
`infini_attention` computes the memory before every segment first (`infini_model.model.memory`),
then local attention and reads of all segments as one batch. Results and gradients are those of the
loop, and gradients flow back to the first segment.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor
from torch.nn import functional

from infini_model.model.kernels.attention import local_attention
from infini_model.model.kernels.memory_ops import gated_read, memory_dtype, residual_read
from infini_model.model.memory import Memory, Update, memory_states
from infini_model.model.rotary import Rope


def _segments(x: Tensor, length: int) -> Tensor:
    """[B, H, T, D] as [B, S, H, length, D], padded with zeros after the last token."""
    missing = -x.size(2) % length
    if missing:
        x = functional.pad(x, (0, 0, 0, missing))
    return x.reshape(*x.shape[:2], -1, length, x.size(3)).transpose(1, 2)


def infini_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    *,
    segment_length: int,
    rope: Rope | None = None,
    memory: Memory | None = None,
    update: Update = "linear",
    backend: str = "auto",
    reset: Tensor | None = None,
    memory_keys: Tensor | None = None,
    memory_values: Tensor | None = None,
    memory_queries: Tensor | None = None,
    memory_gates: Tensor | None = None,
    causal: bool = True,
) -> tuple[Tensor, Memory]:
    """Infini-attention over all segments at once (arXiv 2404.07143, equations 2 to 10).

    Each segment reads the memory of the segments before it, then is written to it. A trailing
    partial segment is not written. Where the memory is empty, the result is exactly the local
    attention.

    Several streams of queries may read one memory: with fewer rows B_m in `memory_keys` and
    `memory_values` than in `q`, row i of `q` reads the memory of row i mod B_m. Block diffusion
    (arXiv 2503.09573) reads that of the clean tokens for the masked ones.

    Args:
        q: Queries [B, H, T, D]; query head h reads key-value head h // (H / H_kv).
        k: Keys [B, H_kv, T, D], of the dtype of `q`.
        v: Values [B, H_kv, T, D], of the dtype of `q`.
        gate: [H], before the sigmoid; sigmoid(gate) is the share of the memory. Of the residual
            rule w, [H, D].
        segment_length: Tokens of a segment, at least 1.
        rope: (cos, sin), each [segment_length, D], by position inside the segment; applied in the
            local attention only.
        memory: Memory of the preceding tokens, of B_m rows, float32 (float64 for float64 inputs);
            None is empty.
        update: How a segment is written: `linear` adds to the memory, `delta` replaces what the
            memory returns for the same keys, `residual` adds to another kind of memory; see
            `infini_model.model.memory`.
        backend: Kernel of the local attention; one of `LaunchConfig.attention_backend`.
        reset: [B_m, ceil(T / segment_length)] bool, true where a segment starts a new document and
            the memory is emptied before it.
        memory_keys: Keys under which values are written, [B_m, H_kv, T, D], where B_m divides B;
            defaults to `k`.
        memory_values: The values written, of the shape of `memory_keys`; defaults to `v`.
        memory_queries: Queries that read the memory, of the shape of `q`; defaults to `q`.
        memory_gates: β and g of the residual rule, [B_m, H_kv, T, 2] in the memory's dtype: the
            factor of what each token writes, and the logarithm of the factor by which it multiplies
            what is older, at most 0; defaults to β = 1 and g = 0.
        causal: Whether a position sees only what precedes it in its segment, not all of the
            segment. The memory is of earlier segments in both cases.

    Returns:
        The attention [B, H, T, D] in the dtype of `q`, and the memory of B_m rows after the last
        full segment (emptied, if a trailing partial segment is reset).

    Raises:
        ValueError: A shape, head count, device, `segment_length` or `update` does not fit.
        TypeError: A dtype does not fit.
        ConfigError: The backend is unknown, not installed, or does not support this device.
    """
    keys = k if memory_keys is None else memory_keys
    written = v if memory_values is None else memory_values
    reading = q if memory_queries is None else memory_queries
    _check_qkv(q, k, v, segment_length)
    _check_rope(rope, segment_length, q)
    own = (keys, written, reading, memory_gates)
    _check_memory(q, k, gate, segment_length, memory, update, reset, *own)
    rows, tokens = keys.size(0), q.size(2)
    length = min(segment_length, tokens)
    full = tokens // segment_length
    queries, local_keys, values = (_segments(x, length) for x in (q, k, v))
    reading = queries if memory_queries is None else _segments(reading, length)
    written = values if memory_values is None else _segments(written, length)

    if memory is None:
        memory = Memory.empty(update, rows, *k.shape[1::2], dtype=k.dtype, device=k.device)
    if reset is not None:
        # One column per segment that reads, and one for the memory returned. A trailing partial
        # segment reads the memory that is returned, so they share a column.
        reset = functional.pad(reset, (0, full + 1 - reset.size(1)))
    gates = None if memory_gates is None else _segments(memory_gates, length)[:, :full]
    before, after = memory_states(
        _segments(keys, length)[:, :full], written[:, :full], memory, reset, update, gates
    )
    if full < queries.size(1):
        before = before.map(lambda x, last: torch.cat((x, last.unsqueeze(1)), 1), after)

    local = _local_segments(
        queries, local_keys, values, rope, backend, tokens=tokens, causal=causal
    )
    reading, local = (_by_memory(x, rows) for x in (reading, local))
    out = read_memory(reading, local, gate, before.map(lambda x: x.flatten(0, 1)))
    return _by_stream(out, rows, queries)[:, :, :tokens], after


def read_memory(q: Tensor, local: Tensor, gate: Tensor, memory: Memory) -> Tensor:
    """Local attention [N, H, L, D] with what `memory`, of N rows, adds to it for the queries `q`.

    `gate` is that of `infini_attention`.
    """
    if memory.norm is None:
        return residual_read(q, local, gate, memory.kv)
    return gated_read(q, local, gate, memory.kv, memory.norm)


def _by_memory(x: Tensor, rows: int) -> Tensor:
    """[n · rows, S, H, L, D] as [rows · S, H, n · L, D]: all streams beside the memory they read.

    Otherwise each stream would need its own copy of the memories.
    """
    streams = x.reshape(-1, rows, *x.shape[1:])
    return streams.permute(1, 2, 3, 0, 4, 5).flatten(3, 4).flatten(0, 1)


def _by_stream(out: Tensor, rows: int, segments: Tensor) -> Tensor:
    """The inverse of `_by_memory`, as [n · rows, H, S · L, D] for `segments` [n · rows, S, …]."""
    _, count, heads, length, width = segments.shape
    out = out.view(rows, count, heads, -1, length, width)
    return out.permute(3, 0, 2, 1, 4, 5).flatten(0, 1).flatten(2, 3)


def _local_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rope: Rope | None,
    backend: str,
    *,
    tokens: int,
    causal: bool,
) -> Tensor:
    """Local attention of segments [B, S, H, L, D], padded after the first `tokens` positions."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tables = None if rope is None else (rope[0][: q.size(3)], rope[1][: q.size(3)])
        flat = (x.flatten(0, 1) for x in (q, k, v))
        return local_attention(*flat, rope=tables, backend=backend, causal=causal).reshape(q.shape)

    padding = q.size(1) * q.size(3) - tokens
    if causal or not padding:
        return attend(q, k, v)
    # Only a causal mask hides the padding: without one, the last segment is attended to by itself.
    full = attend(*(x[:, :-1] for x in (q, k, v)))
    last = attend(*(x[:, -1:, :, :-padding] for x in (q, k, v)))
    return torch.cat((full, functional.pad(last, (0, 0, 0, padding))), dim=1)


def segmented_local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    segment_length: int,
    rope: Rope | None = None,
    backend: str = "auto",
    causal: bool = True,
) -> Tensor:
    """Attention inside each segment only, for a model without memory.

    Arguments, result and errors are those of `infini_attention`.
    """
    _check_qkv(q, k, v, segment_length)
    _check_rope(rope, segment_length, q)
    tokens = q.size(2)
    length = min(segment_length, tokens)
    queries, keys, values = (_segments(x, length) for x in (q, k, v))
    out = _local_segments(queries, keys, values, rope, backend, tokens=tokens, causal=causal)
    return out.transpose(1, 2).flatten(2, 3)[:, :, :tokens]


def _expect(
    name: str, x: Tensor, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None
) -> None:
    """Raise unless `x` has `shape`, the device of `like`, and `dtype` if that matters."""
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(x.shape)}")
    if x.device != like.device:
        raise ValueError(f"{name}: expected device {like.device} as q, got {x.device}")
    if dtype not in (None, x.dtype):
        raise TypeError(f"{name}: expected dtype {dtype}, got {x.dtype}")


def _check_qkv(q: Tensor, k: Tensor, v: Tensor, segment_length: int) -> None:
    for name, x in (("q", q), ("k", k)):
        if x.dim() != 4:
            raise ValueError(f"{name}: expected 4 dimensions [B, heads, T, D], got {list(x.shape)}")
    if not q.is_floating_point():
        raise TypeError(f"q: expected a floating-point dtype, got {q.dtype}")
    batch, heads, tokens, head_dim = q.shape
    if tokens < 1:
        raise ValueError("q: expected at least 1 token, got 0")
    kv_heads = k.size(1)
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"k: expected a number of heads that divides q's {heads}, got {kv_heads}")
    for name, x in (("k", k), ("v", v)):
        _expect(name, x, (batch, kv_heads, tokens, head_dim), q, q.dtype)
    if segment_length < 1:
        raise ValueError(f"segment_length: expected at least 1, got {segment_length}")


def _check_rope(rope: Rope | None, segment_length: int, q: Tensor) -> None:
    if rope is not None:
        for name, table in zip(("rope cos", "rope sin"), rope, strict=True):
            _expect(name, table, (segment_length, q.size(3)), q)


def _check_memory(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    segment_length: int,
    memory: Memory | None,
    update: Update,
    reset: Tensor | None,
    keys: Tensor,
    values: Tensor,
    queries: Tensor,
    gates: Tensor | None,
) -> None:
    """Raise on the first argument of the memory that does not fit `q`, `k` or another one."""
    rows, (_, heads, tokens, head_dim) = len(keys), k.shape
    if rows < 1 or len(q) % rows:
        raise ValueError(
            f"memory_keys: expected a number of rows that divides {len(q)}, got {rows}"
        )
    if update not in get_args(Update):
        raise ValueError(f"update: expected one of {', '.join(get_args(Update))}, got {update!r}")
    is_residual, exact = update == "residual", memory_dtype(q.dtype)
    if memory is not None and is_residual != (memory.norm is None):
        raise ValueError(f"memory: does not belong to update {update!r}")
    if gates is not None and not is_residual:
        raise ValueError(f"memory_gates: not with update {update!r}")
    kv, norm = (None, None) if memory is None else memory
    written, features = (rows, heads, tokens, head_dim), head_dim * (2 if is_residual else 1)
    expected: list[tuple[str, Tensor | None, tuple[int, ...], torch.dtype | None]] = [
        ("memory_keys", keys, written, q.dtype),
        ("memory_values", values, written, q.dtype),
        ("memory_queries", queries, tuple(q.shape), q.dtype),
        ("gate", gate, (q.size(1), head_dim) if is_residual else (q.size(1),), None),
        ("memory.kv", kv, (rows, heads, features, head_dim), exact),
        ("memory.norm", norm, (rows, heads, head_dim), exact),
        ("reset", reset, (rows, -(-tokens // segment_length)), torch.bool),
        ("memory_gates", gates, (rows, heads, tokens, 2), exact),
    ]
    for name, x, shape, dtype in expected:
        if x is not None:
            _expect(name, x, shape, q, dtype)
