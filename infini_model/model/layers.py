"""The layers of an Infini-Llama, and what each carries from one piece of a sequence to the next."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from infini_model.config import AttentionBackend, ModelConfig, RopeScaling
from infini_model.model.attention import infini_attention, segmented_local_attention
from infini_model.model.kernels.local_attention import local_attention
from infini_model.model.kernels.memory_ops import gated_read
from infini_model.model.key_shift import shifted_keys
from infini_model.model.memory import Memory, written
from infini_model.model.rotary import Rope, rotate


@dataclass(frozen=True)
class LayerState:
    """What one layer carries from one piece of a sequence to the next; at most one segment long.

    Attributes:
        memory: The memory of all finished segments.
        keys: Rotated keys of the unfinished segment, [B, H_kv, n, D], n up to segment_length + 1,
            where the last place takes padding; what lies behind the unfinished tokens is never
            looked at.
        values: Its values, of the same shape.
        memory_keys: The keys under which these values will be written, of the same shape.
        last_key: The last token's key before the shift, [B, H_kv, D].
    """

    memory: Memory
    keys: Tensor
    values: Tensor
    memory_keys: Tensor
    last_key: Tensor


class Step(NamedTuple):
    """Where the tokens of a piece fall in the unfinished segment of each row.

    Attributes:
        slots: [B, T], the place of each token in the segment; segment_length for padding.
        visible: [B, 1, T, n], which keys a token sees; n reaches to the last that any does.
        closes: [B], whether the row's segment is full after the piece; None if no row's is.
        last: [B], index of each row's last token in the piece; -1 where it has none.
        fresh: [B], whether the row has seen no token before.
        in_place: Whether the state before the piece is given up, and its buffers written to.
    """

    slots: Tensor
    visible: Tensor
    closes: Tensor | None
    last: Tensor
    fresh: Tensor
    in_place: bool


class Attention(nn.Module):
    """Grouped-query attention with a memory; see `infini_model.model.attention`."""

    def __init__(self, config: ModelConfig, backend: AttentionBackend) -> None:
        super().__init__()
        self.config, self.backend = config, backend
        self.head_dim = config.head_dim
        width = config.num_attention_heads * self.head_dim
        kv_width = config.key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        if config.memory != "none":
            # sigmoid(0) = 1/2, where a gate moves fastest; an empty memory halves nothing.
            self.gate = nn.Parameter(torch.zeros(config.num_attention_heads))
        if config.memory != "none" and config.memory_key_shift:
            self.memory_key_shift = nn.Parameter(torch.full((config.key_value_heads,), 0.5))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, T, D], keys and values [B, H_kv, T, D] of `x` [B, T, hidden]."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return q, k, v

    def shift(self, k: Tensor, before: Tensor | None, starts: Tensor | None) -> Tensor:
        """Memory keys lerp(k_t, k_{t−1}, μ); the first token of a document keeps its own key.

        Args:
            k: Keys [B, H_kv, T, D].
            before: Key of the token before the first, [B, H_kv, D]; None if there is none.
            starts: [B, T] bool, true where a document starts.
        """
        if self.config.memory == "none" or not self.config.memory_key_shift:
            return k
        share = self.memory_key_shift.to(k.dtype)[:, None].expand(k.shape[:3])
        if starts is not None:
            share = share.masked_fill(starts[:, None], 0.0)
        alone = before is None
        if before is None:
            share = share[:, :, 1:]
        else:
            k = torch.cat((before.unsqueeze(2).to(k.dtype), k), dim=2)
        shifted: Tensor = shifted_keys(k, functional.pad(share, (1, 0)))
        return shifted if alone else shifted[:, :, 1:]

    def forward(
        self, x: Tensor, rope: Rope, state: LayerState | None, reset: Tensor | None
    ) -> tuple[Tensor, LayerState]:
        """Attend to `x` [B, T, hidden], which starts on a segment border, all segments at once."""
        config, length = self.config, self.config.segment_length
        q, k, v = self.project(x)
        starts = None
        if reset is not None:
            starts = functional.pad(reset.unsqueeze(-1), (0, length - 1)).flatten(1)[:, : k.size(2)]
        memory_keys = self.shift(k, None if state is None else state.last_key, starts)
        memory = None if state is None else state.memory
        if config.memory == "none":
            out = segmented_local_attention(
                q, k, v, segment_length=length, rope=rope, backend=self.backend
            )
            memory = empty_memory(config, k) if memory is None else memory
        else:
            out, memory = infini_attention(
                q,
                k,
                v,
                self.gate,
                segment_length=length,
                rope=rope,
                memory=memory,
                update=config.memory,
                backend=self.backend,
                reset=reset,
                memory_keys=memory_keys,
            )
        # Copies: views would keep the whole sequence and all its memories in the state.
        open_keys, open_values, open_memory_keys = (
            y[:, :, k.size(2) // length * length :].clone() for y in (k, v, memory_keys)
        )
        memory = Memory(*(x.clone() for x in memory))
        cos, sin = (table[: open_keys.size(2)] for table in rope)
        after = LayerState(
            memory,
            rotate(open_keys, (cos, sin)),
            open_values,
            open_memory_keys,
            k[:, :, -1].clone(),
        )
        return self.o_proj(out.transpose(1, 2).flatten(2)), after

    def advance(
        self, x: Tensor, rope: Rope, state: LayerState, step: Step
    ) -> tuple[Tensor, LayerState]:
        """Attend to `x` [B, T, hidden], which lies in the unfinished segment of each row."""
        length = self.config.segment_length
        q, k, v = self.project(x)
        before = torch.where(step.fresh[:, None, None], k[:, :, 0], state.last_key.to(k.dtype))
        memory_keys = self.shift(k, before, None)
        # Padding turns by some angle too; nobody looks at it.
        cos, sin = (table[step.slots.clamp(max=length - 1)].unsqueeze(1) for table in rope)
        keys, values, open_memory_keys = (
            _place(buffer, new, step, length)
            for buffer, new in (
                (state.keys, rotate(k, (cos, sin))),
                (state.values, v),
                (state.memory_keys, memory_keys),
            )
        )
        seen = step.visible.size(-1)
        out = local_attention(
            rotate(q, (cos, sin)),
            keys[:, :, :seen],
            values[:, :, :seen],
            backend=self.backend,
            visible=step.visible,
        )
        memory = state.memory
        if self.config.memory != "none":
            out = gated_read(q, out, self.gate, *memory)
            if step.closes is not None:
                filed, whole = (x[:, :, :length] for x in (open_memory_keys, values))
                grown = written(memory, filed, whole, self.config.memory)
                memory = Memory(
                    *(
                        torch.where(step.closes.reshape(-1, *[1] * (old.dim() - 1)), new, old)
                        for old, new in zip(memory, grown, strict=True)
                    )
                )
        newest = k.gather(
            2, step.last.clamp(min=0)[:, None, None, None].expand(-1, k.size(1), 1, k.size(3))
        ).squeeze(2)
        last_key = torch.where(step.last[:, None, None] < 0, before, newest)
        after = LayerState(memory, keys, values, open_memory_keys, last_key)
        return self.o_proj(out.transpose(1, 2).flatten(2)), after


def _place(buffer: Tensor, new: Tensor, step: Step, length: int) -> Tensor:
    """`buffer` [B, H_kv, n, D], grown to `length` + 1 places, with `new` [B, H_kv, T, D] in its."""
    missing = length + 1 - buffer.size(2)
    if missing:
        buffer = functional.pad(buffer, (0, 0, 0, missing))
    elif not step.in_place:
        buffer = buffer.clone()
    return buffer.scatter_(2, step.slots[:, None, :, None].expand_as(new), new.to(buffer.dtype))


def empty_memory(config: ModelConfig, like: Tensor) -> Memory:
    """A layer's memory before the first token, for as many rows as `like` has, on its device."""
    return Memory.empty(
        like.size(0),
        config.key_value_heads,
        config.head_dim,
        dtype=like.dtype,
        device=like.device,
    )


class Mlp(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to the same."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each normalised before and added to the residual stream."""

    def __init__(self, config: ModelConfig, backend: AttentionBackend) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, backend)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        state: LayerState | None,
        reset: Tensor | None,
        step: Step | None,
    ) -> tuple[Tensor, LayerState]:
        """[B, T, hidden] to the same and the layer's state after it."""
        normed = self.input_layernorm(x)
        if step is not None and state is not None:
            attended, after = self.self_attn.advance(normed, rope, state, step)
        else:
            attended, after = self.self_attn(normed, rope, state, reset)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), after


def rope_tables(
    length: int, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> Rope:
    """cos and sin of the rotary embedding, each [length, head_dim] float32, on the CPU.

    The device is named because the model may be built on `meta`, and these come from no file.
    `scaling` changes the frequencies as Llama 3.1 does (The Llama 3 Herd of Models, arXiv
    2407.21783; the rule is that of Hugging Face's `rope_type: llama3`).
    """
    even = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")
    position = torch.arange(length, dtype=torch.float32, device="cpu")
    frequencies = 1.0 / theta ** (even / head_dim)
    if scaling is not None:
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        frequencies = frequencies * (kept + (1.0 - kept) / scaling.factor)
    angles = torch.outer(position, frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()
