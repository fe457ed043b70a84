"""Infini-attention: exact causal attention inside segments, a compressive memory for all before.

The function follows "Leave No Context Behind" (arXiv 2404.07143), equations 2 to 10, with the
linear update. Every segment of a sequence is computed at once: the memory that segment s reads is
the sum of what the segments before it wrote, so an exclusive prefix sum over segments replaces the
loop, and gradients reach the first segment as they would through the loop.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from infini_model.errors import ConfigError

Rope = tuple[Tensor, Tensor]

# A read whose weights sum to less than this has found nothing: the memory is empty, or every
# product of features has underflowed. Its square is well inside float32, so that neither the
# division nor its gradient can overflow.
NOTHING_FOUND = 1e-18

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_CPU_BACKENDS = ("auto", "flash", "math")


class Memory(NamedTuple):
    """What a layer remembers of all finished segments: constant in size.

    Attributes:
        kv: σ(K)ᵀV summed over what was written, [B, H_kv, D, D], float32 (float64 for float64).
        norm: Σσ(K) over the same, [B, H_kv, D], of the same dtype.
    """

    kv: Tensor
    norm: Tensor

    @classmethod
    def empty(
        cls, batch: int, heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> Memory:
        """A memory that nothing was written to, for activations of `dtype`."""
        exact = memory_dtype(dtype)
        return cls(
            torch.zeros(batch, heads, head_dim, head_dim, dtype=exact, device=device),
            torch.zeros(batch, heads, head_dim, dtype=exact, device=device),
        )


def memory_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a memory beside activations of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def feature_map(x: Tensor) -> Tensor:
    """σ = ELU + 1 (paper, below equation 4), in the memory's dtype.

    Written as relu(x) + exp(min(x, 0)): `elu(x) + 1` loses every digit where exp(x) is small.
    """
    x = x.to(memory_dtype(x.dtype))
    return functional.relu(x) + x.clamp(max=0).exp()


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding of `x` [..., L, D] by `rope` = (cos, sin), each broadcast to [..., L, D].

    The halves of a head are the pairs, as in Hugging Face's Llama. The dtype of `x` is kept.
    """
    cos, sin = rope
    half = x.size(-1) // 2
    signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
    return torch.addcmul(x * cos, x.roll(half, dims=-1), signed).to(x.dtype)


def _flash_attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by the flash-attn package; heads before positions, as everywhere here."""
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        try:
            from flash_attn import flash_attn_func
        except ImportError as error:
            raise ConfigError(
                "model.attention_backend: got 'flash_attn', but the package flash-attn is not "
                "installed (requirements-gpu.txt)"
            ) from error
    result: Any = flash_attn_func(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True
    )
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out.transpose(1, 2)


def local_attention(
    q: Tensor, k: Tensor, v: Tensor, *, backend: str = "auto", visible: Tensor | None = None
) -> Tensor:
    """Exact softmax attention (equations 2 and 3), causal unless `visible` says what is seen.

    Args:
        q: Queries [N, H, L, D].
        k: Keys [N, H_kv, M, D]; query head h reads head h // (H / H_kv).
        v: Values [N, H_kv, M, D].
        backend: Kernel; one of `ModelConfig.attention_backend`.
        visible: Bool, broadcast to [N, H, L, M], true where a query sees a key.

    Returns:
        [N, H, L, D].

    Raises:
        ConfigError: The backend is unknown, not installed, or not for this device.
    """
    known = ("auto", "flash_attn", *_KERNELS)
    takes = known if q.is_cuda else _CPU_BACKENDS
    if backend not in takes:
        raise ConfigError(
            f"model.attention_backend: got {backend!r}: on {q.device.type} it takes "
            f"{', '.join(takes)}"
        )
    if backend == "flash_attn" and visible is None:
        return _flash_attn(q, k, v)
    # flash_attn and flash take no mask; torch chooses for the few queries of a generation step.
    free = backend in ("auto", "flash_attn") or (backend == "flash" and visible is not None)
    with contextlib.nullcontext() if free else sdpa_kernel(_KERNELS[backend]):
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=visible is None, enable_gqa=q.size(1) != k.size(1)
        )


def written(keys: Tensor, values: Tensor) -> Memory:
    """What one segment adds to the memory (equation 8, linear).

    Args:
        keys: [..., L, D]; any leading dimensions.
        values: [..., L, D].

    Returns:
        `Memory` of kv [..., D, D] and norm [..., D], in the memory's dtype.
    """
    with torch.autocast(keys.device.type, enabled=False):
        features = feature_map(keys)
        return Memory(features.mT @ values.to(features.dtype), features.sum(dim=-2))


def gated_read(q: Tensor, local: Tensor, gate: Tensor, memory: Memory) -> Tensor:
    """Read the memory and mix it with the local attention (equations 7 and 10).

    Where the memory is empty the result is `local` exactly.

    Args:
        q: Queries without rotary embedding, [..., H, L, D].
        local: Local attention, of the shape of `q`.
        gate: [H], before the sigmoid.
        memory: kv [..., H_kv, D, D] and norm [..., H_kv, D].

    Returns:
        Of the shape and dtype of `local`.
    """
    with torch.autocast(q.device.type, enabled=False):
        kv, norm = memory
        heads = norm.size(-2)
        features = feature_map(q)
        # The queries that share a key-value head are one longer list of queries to it.
        grouped = features.reshape(*q.shape[:-3], heads, -1, q.size(-1))
        total = (grouped @ norm.unsqueeze(-1)).reshape(*q.shape[:-1], 1)
        found = (grouped @ kv).reshape(q.shape)
        hit = total > NOTHING_FOUND
        share = gate.to(total.dtype).sigmoid()[:, None, None] * hit
        # The mix with all that is one number a query gathered first: the tensors of full width,
        # which cost the time, are gone through once.
        per_weight = share / torch.where(hit, total, 1.0)
        mixed = torch.addcmul(local.to(total.dtype) * (1.0 - share), found, per_weight)
        return mixed.to(local.dtype)


def _prefix_sums(x: Tensor, starts: Tensor | None) -> Tensor:
    """Inclusive sums of `x` [B, N, ...] over N that begin anew where `starts` [B, N] is true.

    With starts, sums over 1, 2, 4, … neighbours are joined, and a sum that would cross a start is
    left out instead of being subtracted later, so that nothing of it remains, not even rounding.
    """
    if starts is None:
        return x.cumsum(dim=1)
    crosses = starts.reshape(*starts.shape, *[1] * (x.dim() - 2))
    distance = 1
    while distance < x.size(1):
        carried = x[:, :-distance].masked_fill(crosses[:, distance:], 0.0)
        x = torch.cat((x[:, :distance], x[:, distance:] + carried), dim=1)
        joined = crosses[:, distance:] | crosses[:, :-distance]
        crosses = torch.cat((crosses[:, :distance], joined), dim=1)
        distance *= 2
    return x


def _memories(written_by: Memory, first: Memory, reset: Tensor | None) -> Memory:
    """The memory before each segment and, last, after all of them.

    Args:
        written_by: What segment s writes, kv [B, N, H_kv, D, D] and norm [B, N, H_kv, D].
        first: The memory before segment 0.
        reset: [B, N + 1] bool, true where the memory is emptied before it is read.

    Returns:
        kv [B, N + 1, H_kv, D, D] and norm [B, N + 1, H_kv, D].
    """
    sums = []
    for start, added in zip(first, written_by, strict=True):
        terms = torch.cat((start.unsqueeze(1), added), dim=1)
        if reset is not None:
            terms = terms.masked_fill(reset.reshape(*reset.shape, *[1] * (terms.dim() - 2)), 0.0)
        sums.append(_prefix_sums(terms, reset))
    return Memory(*sums)


def _segments(x: Tensor, length: int) -> Tensor:
    """[B, H, T, D] as [B, S, H, length, D], zeros behind the last token."""
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
    update: str = "linear",
    backend: str = "auto",
    reset: Tensor | None = None,
    memory_keys: Tensor | None = None,
) -> tuple[Tensor, Memory]:
    """Infini-attention over all segments at once (arXiv 2404.07143, equations 2 to 10).

    Each segment first reads the memory of the segments before it, then is written to it. A
    trailing partial segment reads but is not written. Where the memory is empty the result is the
    local attention alone, exactly.

    Args:
        q: Queries [B, H, T, D]; query head h reads key-value head h // (H / H_kv).
        k: Keys [B, H_kv, T, D], of the dtype of `q`.
        v: Values [B, H_kv, T, D], of the dtype of `q`.
        gate: [H], before the sigmoid; sigmoid(gate) is the share of the memory.
        segment_length: Tokens of a segment, at least 1.
        rope: (cos, sin), each [segment_length, D], by position inside the segment; used by the
            local attention alone.
        memory: What was written before, float32 (float64 for float64 inputs); None is empty.
        update: The rule by which a segment is written; `linear`.
        backend: Kernel of the local attention; one of `ModelConfig.attention_backend`.
        reset: [B, ceil(T / segment_length)] bool, true where a segment starts a new document and
            the memory is emptied before it.
        memory_keys: Keys under which the values are written, of the shape of `k`; None is `k`.

    Returns:
        The attention [B, H, T, D] in the dtype of `q`, and the memory after the last full segment
        (emptied, if a trailing partial segment is reset).

    Raises:
        ValueError: A shape, a head count, a device, `segment_length` or `update` does not fit.
        TypeError: A dtype does not fit.
        ConfigError: The backend is unknown, not installed, or not for this device.
    """
    keys = k if memory_keys is None else memory_keys
    _check(q, k, v, gate, segment_length, rope, memory, update, reset, keys)
    tokens = q.size(2)
    length = min(segment_length, tokens)
    full = tokens // segment_length
    queries, local_keys, values = (_segments(x, length) for x in (q, k, v))

    if memory is None:
        memory = Memory.empty(k.size(0), k.size(1), k.size(3), dtype=k.dtype, device=k.device)
    if reset is not None:
        # The last column asks about the memory that comes out; a partial segment has its own.
        reset = functional.pad(reset, (0, full + 1 - reset.size(1)))
    new = written(_segments(keys, length)[:, :full], values[:, :full])
    memories = _memories(new, memory, reset)
    before = Memory(*(x[:, : queries.size(1)] for x in memories))

    local = _local_segments(queries, local_keys, values, rope, backend)
    out = gated_read(queries, local, gate, before)
    out = out.transpose(1, 2).flatten(2, 3)[:, :, :tokens]
    return out, Memory(*(x[:, -1] for x in memories))


def _local_segments(q: Tensor, k: Tensor, v: Tensor, rope: Rope | None, backend: str) -> Tensor:
    """Local attention of segments [B, S, H, L, D], batched over B · S."""
    if rope is not None:
        cos, sin = (table[: q.size(3)] for table in rope)
        q, k = rotate(q, (cos, sin)), rotate(k, (cos, sin))
    out = local_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), backend=backend)
    return out.reshape(q.shape)


def segmented_local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    segment_length: int,
    rope: Rope | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention inside each segment by itself: `infini_attention` of a model without memory.

    Arguments, result and errors are those of `infini_attention`.
    """
    _check_qkv(q, k, v, k, segment_length)
    _check_rope(rope, segment_length, q)
    length = min(segment_length, q.size(2))
    queries, keys, values = (_segments(x, length) for x in (q, k, v))
    out = _local_segments(queries, keys, values, rope, backend)
    return out.transpose(1, 2).flatten(2, 3)[:, :, : q.size(2)]


def _expect(name: str, x: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """Raise unless `x` has `shape` and the device of `like`."""
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(x.shape)}")
    if x.device != like.device:
        raise ValueError(f"{name}: expected device {like.device} as q, got {x.device}")


def _expect_dtype(name: str, x: Tensor, dtype: torch.dtype) -> None:
    if x.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {dtype}, got {x.dtype}")


def _check_qkv(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, segment_length: int) -> None:
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
    for name, x in (("k", k), ("v", v), ("memory_keys", keys)):
        _expect(name, x, (batch, kv_heads, tokens, head_dim), q)
        _expect_dtype(name, x, q.dtype)
    if segment_length < 1:
        raise ValueError(f"segment_length: expected at least 1, got {segment_length}")


def _check_rope(rope: Rope | None, segment_length: int, q: Tensor) -> None:
    if rope is not None:
        for name, table in zip(("rope cos", "rope sin"), rope, strict=True):
            _expect(name, table, (segment_length, q.size(3)), q)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    segment_length: int,
    rope: Rope | None,
    memory: Memory | None,
    update: str,
    reset: Tensor | None,
    keys: Tensor,
) -> None:
    """Raise on the first argument of `infini_attention` that does not fit the others."""
    _check_qkv(q, k, v, keys, segment_length)
    _check_rope(rope, segment_length, q)
    _expect("gate", gate, (q.size(1),), q)
    if update != "linear":
        raise ValueError(f"update: expected 'linear', got {update!r}")
    if memory is not None:
        batch, heads, _, head_dim = k.shape
        _expect("memory.kv", memory.kv, (batch, heads, head_dim, head_dim), q)
        _expect("memory.norm", memory.norm, (batch, heads, head_dim), q)
        for name, x in zip(("memory.kv", "memory.norm"), memory, strict=True):
            _expect_dtype(name, x, memory_dtype(q.dtype))
    if reset is not None:
        _expect("reset", reset, (q.size(0), -(-q.size(2) // segment_length)), q)
        _expect_dtype("reset", reset, torch.bool)
