"""Infini-attention ("Leave No Context Behind", arXiv 2404.07143), all segments at once.

A sequence is cut into segments. Each head attends exactly to its window, which is its segment and
some before it (`infini_model.model.window`), and reads everything before its segment from a memory
of constant size (`infini_model.model.memory`). The parts are independent: where the memory is empty
the result is exactly that of the window.

`infini_model.hf.modeling_infini_llama` is the loop over segments for the default memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infini_model.model.kernels.memory_ops import memory_dtype
from infini_model.model.memory import RULES, Memory
from infini_model.model.rotary import Rope
from infini_model.model.window import Window, segmented


def infini_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    read_weight: Tensor,
    *,
    segment_length: int,
    rope: Rope | None = None,
    memory: Memory | None = None,
    update: str = "linear",
    backend: str = "auto",
    document_starts: Tensor | None = None,
    memory_keys: Tensor | None = None,
    memory_values: Tensor | None = None,
    memory_queries: Tensor | None = None,
    memory_gates: Tensor | None = None,
    causal: bool = True,
    window_segments: int = 0,
    window_sinks: int = 0,
) -> tuple[Tensor, Memory]:
    """Infini-attention over all segments at once (arXiv 2404.07143, equations 2 to 10).

    Each segment reads the memory of the segments before it, then is written to it. A trailing
    partial segment is not written. Where the memory is empty, the result is exactly the attention
    of the window, in which nothing is from before the first token.

    Several streams of queries may read one past: with fewer rows B_m in `memory_keys` and
    `memory_values` than in `q`, row i of `q` reads the memory of row i mod B_m, and sees its
    earlier segments. Block diffusion (arXiv 2503.09573) reads that of the clean tokens for the
    masked ones.

    Args:
        q: Queries [B, H, T, D]; query head h reads key-value head h // (H / H_kv).
        k: Keys [B, H_kv, T, D], of the dtype of `q`.
        v: Values [B, H_kv, T, D], of the dtype of `q`.
        read_weight: [H], before the sigmoid, which is the share of the memory. Of the residual rule
            w, [H, D].
        segment_length: Tokens of a segment, at least 1.
        rope: (cos, sin), each [window_sinks + (window_segments + 1) · segment_length, D], by
            position relative to the segment, the last at segment_length − 1; applied in the window
            only.
        memory: Memory of the preceding tokens, of B_m rows, float32 (float64 for float64 inputs);
            None is empty.
        update: How a segment is written: `linear` adds to the memory, `delta` replaces what the
            memory returns for the same keys, `residual` adds to another kind of memory; see
            `infini_model.model.memory`.
        backend: Kernel of the window's attention; one of `LaunchConfig.attention_backend`.
        document_starts: [B_m, ceil(T / segment_length)] bool, true where a segment starts a new
            document: memory and window are emptied before it.
        memory_keys: Keys under which values are written, [B_m, H_kv, T, D], where B_m divides B;
            defaults to `k`.
        memory_values: The values written, of the shape of `memory_keys`; defaults to `v`.
        memory_queries: Queries that read the memory, of the shape of `q`; defaults to `q`.
        memory_gates: β and g of the residual rule, [B_m, H_kv, T, 2] in the memory's dtype: the
            factor of what each token writes, and the logarithm of the factor by which it multiplies
            what is older, at most 0; defaults to β = 1 and g = 0.
        causal: Whether a position sees only what precedes it in its segment, not all of the
            segment, as masked diffusion needs (LLaDA, arXiv 2502.09992). Memory and window are of
            earlier segments in both cases.
        window_segments: Earlier segments of its document that a segment sees exactly.
        window_sinks: First tokens of its document that a segment sees exactly when they are in none
            of these.

    Returns:
        The attention [B, H, T, D] in the dtype of `q`, and the memory of B_m rows after the last
        full segment (emptied, if a trailing partial one starts a document).

    Raises `TypeError` if a dtype does not fit, `ConfigError` if the backend is unknown, not
    installed, or does not support this device, and `ValueError` for all else that does not fit.
    """
    keys = k if memory_keys is None else memory_keys
    written = v if memory_values is None else memory_values
    reading = q if memory_queries is None else memory_queries
    window = Window(segment_length, window_segments, window_sinks, causal, backend)
    own = (keys, written, reading, memory_gates)
    _check(q, k, v, read_weight, window, rope, memory, update, document_starts, *own)
    rule, rows, tokens = RULES[update], keys.size(0), q.size(2)
    if memory is None:
        memory = rule.empty(keys)
    nothing = torch.zeros(rows, dtype=torch.int64, device=q.device)
    sight = window.sight(document_starts, nothing, tokens)
    queries, local_keys, values = (segmented(x, min(segment_length, tokens)) for x in (q, k, v))
    local = window.attend(queries, local_keys, values, rope, tokens=tokens, sight=sight)
    out, after = rule.over_segments(
        *(reading, local, read_weight, keys, written, memory_gates, memory, document_starts),
        full=tokens // segment_length,
    )
    # A copy: a view would keep the memories of all segments.
    return out.transpose(1, 2).flatten(2, 3)[:, :, :tokens], after.map(Tensor.clone)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    read_weight: Tensor,
    window: Window,
    rope: Rope | None,
    memory: Memory | None,
    update: str,
    document_starts: Tensor | None,
    keys: Tensor,
    values: Tensor,
    queries: Tensor,
    gates: Tensor | None,
) -> None:
    """Raise on the first argument of `infini_attention` that does not fit the others."""
    for name, x in (("q", q), ("k", k)):
        if x.dim() != 4:
            raise ValueError(f"{name}: expected 4 dimensions [B, heads, T, D], got {list(x.shape)}")
    if not q.is_floating_point():
        raise TypeError(f"q: expected a floating-point dtype, got {q.dtype}")
    (batch, heads, tokens, width), kv_heads, rows = q.shape, k.size(1), len(keys)
    length, segments, sinks = window[:3]
    for fits, message in (
        (tokens >= 1, "q: expected at least 1 token, got 0"),
        (
            kv_heads >= 1 and heads % kv_heads == 0,
            f"k: expected a number of heads that divides q's {heads}, got {kv_heads}",
        ),
        (length >= 1, f"segment_length: expected at least 1, got {length}"),
        (segments >= 0, f"window_segments: expected at least 0, got {segments}"),
        (0 <= sinks <= length, f"window_sinks: expected 0 to segment_length {length}, got {sinks}"),
        (update in RULES, f"update: expected one of {', '.join(RULES)}, got {update!r}"),
    ):
        if not fits:
            raise ValueError(message)
    exact, rule = memory_dtype(q.dtype), RULES[update]
    if memory is not None and rule.is_normalised == (memory.norm is None):
        raise ValueError(f"memory: does not belong to update {update!r}")
    if gates is not None and not rule.is_gated:
        raise ValueError(f"memory_gates: not with update {update!r}")
    (kv, norm), (cos, sin) = memory or (None, None), rope or (None, None)
    own, table = (batch, kv_heads, tokens, width), (window.kept + length, width)
    written, features = (rows, kv_heads, tokens, width), width * rule.features
    expected: list[tuple[str, Tensor | None, tuple[int, ...], torch.dtype | None]] = [
        ("k", k, own, q.dtype),
        ("v", v, own, q.dtype),
        ("rope cos", cos, table, None),
        ("rope sin", sin, table, None),
        ("memory_keys", keys, written, q.dtype),
        ("memory_values", values, written, q.dtype),
        ("memory_queries", queries, tuple(q.shape), q.dtype),
        ("read_weight", read_weight, (heads, width)[: rule.read_weight_dims], None),
        ("memory.kv", kv, (rows, kv_heads, features, width), exact),
        ("memory.norm", norm, (rows, kv_heads, width), exact),
        ("document_starts", document_starts, (rows, -(-tokens // length)), torch.bool),
        ("memory_gates", gates, (rows, kv_heads, tokens, 2), exact),
    ]
    for name, given, shape, dtype in expected:
        if given is None:
            continue
        if tuple(given.shape) != shape:
            raise ValueError(f"{name}: expected shape {list(shape)}, got {list(given.shape)}")
        if given.device != q.device:
            raise ValueError(f"{name}: expected device {q.device} as q, got {given.device}")
        if dtype not in (None, given.dtype):
            raise TypeError(f"{name}: expected dtype {dtype}, got {given.dtype}")
    if rows < 1 or batch % rows:
        raise ValueError(f"memory_keys: expected a number of rows that divides {batch}, got {rows}")
