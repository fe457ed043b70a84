"""The layers of an Infini-Llama, and the stack of them between embedding and output layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from infini_model.config import AttentionBackend, ModelConfig
from infini_model.model.attention import (
    infini_attention,
    read_memory,
    segmented_local_attention,
)
from infini_model.model.kernels.attention import local_attention
from infini_model.model.kernels.compile import compile_in_training
from infini_model.model.kernels.memory_ops import memory_dtype
from infini_model.model.key_shift import streams_with_previous, with_previous
from infini_model.model.memory import Memory, update_memory
from infini_model.model.precision import as_operand, product_input
from infini_model.model.rotary import Rope, rope_tables, rotate
from infini_model.model.state import CacheUpdate, LayerState, empty_memory

# The last part of the names of the memory's own parameters; all others are Llama's.
MEMORY_PARAMETERS = (
    "gate",
    "memory_weight",
    "memory_write_gate",
    "memory_forget_gate",
    "memory_key_shift",
    "memory_query_shift",
)

# Where the gates of a residual memory start, before sigmoid and softplus: a token writes 90% of its
# value, and lets 0.01% fade of what the memory holds. With 0.1%, text is learned as well, and pass
# keys are lost at four times the trained length (`benchmarks.passkey`).
WRITE_START, FORGET_START = 2.2, -9.0


class LayerContext(NamedTuple):
    """What all layers of a pass share.

    Attributes:
        rope: (cos, sin) by position inside the segment, each [segment_length, D].
        reset: [B, segments] bool, true where a segment starts a new document; None means
            that none does.
        update: Where the tokens go in the open segment of each row; None if they start on a segment
            border.
        streams: The first B / streams rows are written to the memory, which all rows read.
        keep_state: Whether there is a state after the pass.
    """

    rope: Rope
    reset: Tensor | None = None
    update: CacheUpdate | None = None
    streams: int = 1
    keep_state: bool = True


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
        if config.memory == "residual":
            self.memory_weight = nn.Parameter(
                torch.zeros(config.num_attention_heads, self.head_dim)
            )
            gates = torch.zeros(config.key_value_heads, config.hidden_size)
            self.memory_write_gate = nn.Parameter(gates)
            self.memory_forget_gate = nn.Parameter(gates.clone())
        elif config.memory != "none":
            gates = torch.full((config.num_attention_heads,), config.gate_start)
            self.gate = nn.Parameter(gates)
        if config.memory != "none" and config.memory_key_shift:
            self.memory_key_shift = nn.Parameter(torch.full((config.key_value_heads,), 0.5))
        if config.memory != "none" and config.memory_query_shift:
            queries = torch.full((config.num_attention_heads,), 0.5)
            self.memory_query_shift = nn.Parameter(queries)

    @property
    def read_weight(self) -> nn.Parameter:
        """What weighs that which is read from the memory: `gate` [H], or `memory_weight` [H, D]."""
        return self.memory_weight if self.config.memory == "residual" else self.gate

    def read_strength(self, gather: Callable[[Tensor], Tensor] = Tensor.detach) -> Tensor:
        """How much each head reads, [H] float32: sigmoid(gate), or the RMS of `memory_weight`.

        `gather` assembles a weight that is sharded over processes.
        """
        weight = gather(self.read_weight.detach()).float()
        return weight.sigmoid() if weight.dim() == 1 else weight.square().mean(1).sqrt()

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, T, D], keys and values [B, H_kv, T, D] of `x` [B, T, hidden]."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return q, k, v

    def shift_keys(self, k: Tensor, previous: Tensor | None, starts: Tensor | None) -> Tensor:
        """Memory keys; the arguments are those of `with_previous`."""
        if self.config.memory == "none" or not self.config.memory_key_shift:
            return k
        return with_previous(k, self.memory_key_shift, previous, starts)

    def shift_queries(
        self, q: Tensor, previous: Tensor | None, starts: Tensor | None, streams: int = 1
    ) -> Tensor:
        """Memory queries; as `shift_keys`, or as `streams_with_previous` for several streams."""
        if self.config.memory == "none" or not self.config.memory_query_shift:
            return q
        if streams == 1:
            return with_previous(q, self.memory_query_shift, previous, starts)
        if starts is None:
            shape = (len(q) // streams, q.size(2))
            starts = torch.zeros(shape, dtype=torch.bool, device=q.device)
        return streams_with_previous(q, self.memory_query_shift, starts, self.config.segment_length)

    def memory_gates(self, x: Tensor) -> Tensor | None:
        """β = sigmoid(W x + 2.2) and g = −softplus(W' x − 9) of `x` [B, T, hidden].

        Returns:
            [B, H_kv, T, 2], float32 (float64 for float64); None but for a residual memory.
        """
        if self.config.memory != "residual":
            return None
        weights = torch.cat((self.memory_write_gate, self.memory_forget_gate))
        product = functional.linear(x, as_operand(weights, x)).to(memory_dtype(x.dtype))
        writing, forgetting = product.transpose(1, 2).chunk(2, dim=1)
        scale = (writing + WRITE_START).sigmoid()
        return torch.stack((scale, -functional.softplus(forgetting + FORGET_START)), dim=-1)

    def forward(
        self, x: Tensor, context: LayerContext, state: LayerState | None
    ) -> tuple[Tensor, LayerState | None]:
        """Attend to `x` [B, T, hidden], which starts on a segment border, all segments at once.

        With several streams, the state is that of the rows that are written.
        """
        config, length = self.config, self.config.segment_length
        rope, reset, _, streams, keep_state = context
        q, k, v = self.project(x)
        # Not a chunk of a single stream: its backward pass would copy it.
        clean, keys, values, written = (
            y if streams == 1 else y.chunk(streams)[0] for y in (q, k, v, x)
        )
        starts = None
        if reset is not None:
            starts = functional.pad(reset.unsqueeze(-1), (0, length - 1)).flatten(1)[:, : k.size(2)]
        last_key = last_query = memory = None
        if state is not None:
            last_key, last_query, memory = state.last_key, state.last_query, state.memory
        memory_keys = self.shift_keys(keys, last_key, starts)
        gates = self.memory_gates(written)
        local: dict[str, Any] = {
            "segment_length": length,
            "rope": rope,
            "backend": self.backend,
            "causal": not config.bidirectional,
        }
        if config.memory == "none":
            out = segmented_local_attention(q, k, v, **local)
            memory = empty_memory(config, keys) if memory is None else memory
        else:
            out, memory = infini_attention(
                *(q, k, v, self.read_weight),
                memory=memory,
                update=config.memory,
                reset=reset,
                memory_keys=memory_keys,
                memory_values=values,
                memory_queries=self.shift_queries(q, last_query, starts, streams),
                memory_gates=gates,
                **local,
            )
        after = None
        if keep_state:
            after = self._state_after(clean, keys, values, memory_keys, gates, memory, rope)
        return self.o_proj(out.transpose(1, 2).flatten(2)), after

    def _state_after(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        memory_keys: Tensor,
        gates: Tensor | None,
        memory: Memory,
        rope: Rope,
    ) -> LayerState:
        """The state after a pass over all segments; `memory` is of the full ones."""
        config, length = self.config, self.config.segment_length
        # What follows a bidirectional segment would need it anew.
        full = k.size(2) if config.bidirectional else k.size(2) // length * length
        # Copies: views would keep the whole sequence and all its memories in the state.
        open_keys, open_values, open_memory_keys = (
            y[:, :, full:].clone() for y in (k, v, memory_keys)
        )
        cos, sin = (table[: open_keys.size(2)] for table in rope)
        return LayerState(
            memory.map(Tensor.clone),
            rotate(open_keys, (cos, sin)),
            open_values,
            open_memory_keys,
            None if gates is None else gates[:, :, full:].clone(),
            k[:, :, -1].clone(),
            q[:, :, -1].clone() if config.memory_query_shift else None,
        )

    def advance(
        self, x: Tensor, rope: Rope, state: LayerState, update: CacheUpdate
    ) -> tuple[Tensor, LayerState]:
        """Attend to `x` [B, T, hidden], which lies in the open segment of each row."""
        length = self.config.segment_length
        q, k, v = self.project(x)
        starts = update.starts[:, None, None]
        previous = torch.where(starts, k[:, :, 0], state.last_key.to(k.dtype))
        memory_keys = self.shift_keys(k, previous, None)
        # Padding has no position: it gets some valid angle, and its result is ignored.
        cos, sin = (table[update.slots.clamp(max=length - 1)].unsqueeze(1) for table in rope)
        keys = update.write(state.keys, rotate(k, (cos, sin)), length)
        values = update.write(state.values, v, length)
        open_memory_keys = update.write(state.memory_keys, memory_keys, length)
        gates, open_gates = self.memory_gates(x), state.memory_gates
        if gates is not None and open_gates is not None:
            open_gates = update.write(open_gates, gates, length)
        used = update.mask.size(-1)
        out = local_attention(
            rotate(q, (cos, sin)),
            keys[:, :, :used],
            values[:, :, :used],
            backend=self.backend,
            mask=update.mask,
        )
        memory, last_query = state.memory, state.last_query
        if self.config.memory != "none":
            memory_queries = q
            if last_query is not None:
                before = torch.where(starts, q[:, :, 0], last_query.to(q.dtype))
                memory_queries = self.shift_queries(q, before, None)
                last_query = update.newest(q, before)
            out = read_memory(memory_queries, out, self.read_weight, memory)
            memory = self._write_full_segments(memory, open_memory_keys, values, open_gates, update)
        last_key = update.newest(k, previous)
        after = LayerState(memory, keys, values, open_memory_keys, open_gates, last_key, last_query)
        return self.o_proj(out.transpose(1, 2).flatten(2)), after

    def _write_full_segments(
        self,
        memory: Memory,
        keys: Tensor,
        values: Tensor,
        gates: Tensor | None,
        update: CacheUpdate,
    ) -> Memory:
        """The memory after the segments that `update` completes; other rows keep theirs."""
        if update.completes is None or self.config.memory == "none":
            return memory
        length, completes = self.config.segment_length, update.completes
        keys, values = (x[:, :, :length] for x in (keys, values))
        gates = None if gates is None else gates[:, :, :length]
        updated = update_memory(memory, keys, values, self.config.memory, gates)

        def chosen(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(completes.view(-1, *[1] * (old.dim() - 1)), new, old)

        return updated.map(chosen, memory)


class Mlp(nn.Module):
    """SwiGLU feed-forward.

    Attributes:
        compiled: Whether training compiles `gated`; False by default.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.compiled = False
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to the same shape."""
        out: Tensor = self.down_proj(self.gated(x))
        return out

    # Without down_proj: recomputed layers need its input only.
    @compile_in_training
    def gated(self, x: Tensor) -> Tensor:
        """The input of `down_proj`, [..., intermediate]."""
        out: Tensor = functional.silu(self.gate_proj(x)) * self.up_proj(x)
        return out


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream.

    Attributes:
        compiled: Whether training compiles `attend`; False by default.
    """

    def __init__(self, config: ModelConfig, backend: AttentionBackend) -> None:
        super().__init__()
        self.compiled = False
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, backend)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(
        self, x: Tensor, context: LayerContext, state: LayerState | None
    ) -> tuple[Tensor, LayerState | None]:
        """[B, T, hidden] to the same shape, and the layer's state after it."""
        x, normed, after = self.attend(x, context, state)
        return x + self.mlp(normed), after

    # FSDP gathers the feed-forward when it is called, which cannot be compiled.
    @compile_in_training
    def attend(
        self, x: Tensor, context: LayerContext, state: LayerState | None
    ) -> tuple[Tensor, Tensor, LayerState | None]:
        """The residual stream after the attention, the feed-forward's input, and the state."""
        normed = product_input(self.input_layernorm(x))
        if context.update is not None and state is not None:
            attended, after = self.self_attn.advance(normed, context.rope, state, context.update)
        else:
            attended, after = self.self_attn(normed, context, state)
        x = x + attended
        return x, product_input(self.post_attention_layernorm(x)), after


class Decoder(nn.Module):
    """Embedding, layers and final norm: everything but the output layer.

    Attributes:
        gradient_checkpointing: Whether training keeps only the input of each layer and recomputes
            the layer in the backward pass (Chen et al., arXiv 1604.06174); False by default.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, vocab_size: int, backend: AttentionBackend) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, backend) for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        cos, sin = rope_tables(
            config.segment_length, config.head_dim, config.rope_theta, config.rope_scaling
        )
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.gradient_checkpointing = False

    def compile_layers(self, *, attention: bool = True, feed_forward: bool = True) -> None:
        """Choose which halves of the layers training compiles; at first, none.

        They are compiled when they are first used; see `infini_model.model.kernels.compile`.
        """
        for module in self.modules():
            if isinstance(module, Mlp):
                module.compiled = feed_forward
            elif isinstance(module, DecoderLayer):
                module.compiled = attention

    def forward(
        self,
        input_ids: Tensor,
        states: tuple[LayerState, ...] | None = None,
        reset: Tensor | None = None,
        update: CacheUpdate | None = None,
        *,
        streams: int = 1,
        keep_state: bool = True,
    ) -> tuple[Tensor, tuple[LayerState, ...]]:
        """[B, T] ids to [B, T, hidden], and the layers' states after them, if they are to be kept.

        `reset`, `update`, `streams` and `keep_state` are those of `LayerContext`.
        """
        x, after = self.embed_tokens(input_ids), list[LayerState]()
        context = LayerContext((self.cos, self.sin), reset, update, streams, keep_state)
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        for index, layer in enumerate(self.layers):
            inputs = (x, context, None if states is None else states[index])
            # No layer draws random numbers, so there is no generator state to restore.
            x, new = (
                checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
                if recompute
                else layer(*inputs)
            )
            if keep_state:
                after.append(new)
        return self.norm(x), tuple(after)
