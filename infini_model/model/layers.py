"""The layers of an Infini-Llama, and the stack of them between embedding and output layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from infini_model.config import AttentionBackend, ModelConfig
from infini_model.model.attention import infini_attention, segmented_local_attention
from infini_model.model.kernels.local_attention import local_attention
from infini_model.model.kernels.memory_ops import gated_read
from infini_model.model.key_shift import shifted_keys
from infini_model.model.memory import Memory, update_memory
from infini_model.model.rotary import Rope, rope_tables, rotate
from infini_model.model.state import CacheUpdate, LayerState, empty_memory


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
            # sigmoid(0) = 1/2, where the gate's gradient is largest. An empty memory is not mixed
            # in at all, so the first segment is not halved.
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

    def shift(self, k: Tensor, previous: Tensor | None, starts: Tensor | None) -> Tensor:
        """Memory keys lerp(k_t, k_{t−1}, μ); the first token of a document keeps its own key.

        Args:
            k: Keys [B, H_kv, T, D].
            previous: Key of the token before the first, [B, H_kv, D]; None if there is none.
            starts: [B, T] bool, true where a document starts.
        """
        if self.config.memory == "none" or not self.config.memory_key_shift:
            return k
        share = self.memory_key_shift.to(k.dtype)[:, None].expand(k.shape[:3])
        if starts is not None:
            share = share.masked_fill(starts[:, None], 0.0)
        if previous is None:
            shifted: Tensor = shifted_keys(k, functional.pad(share[:, :, 1:], (1, 0)))
            return shifted
        k = torch.cat((previous.unsqueeze(2).to(k.dtype), k), dim=2)
        shifted = shifted_keys(k, functional.pad(share, (1, 0)))
        return shifted[:, :, 1:]

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
        self, x: Tensor, rope: Rope, state: LayerState, update: CacheUpdate
    ) -> tuple[Tensor, LayerState]:
        """Attend to `x` [B, T, hidden], which lies in the open segment of each row."""
        length = self.config.segment_length
        q, k, v = self.project(x)
        previous = torch.where(update.starts[:, None, None], k[:, :, 0], state.last_key.to(k.dtype))
        memory_keys = self.shift(k, previous, None)
        # Padding has no position: it gets some valid angle, and its result is ignored.
        cos, sin = (table[update.slots.clamp(max=length - 1)].unsqueeze(1) for table in rope)
        keys = update.write(state.keys, rotate(k, (cos, sin)), length)
        values = update.write(state.values, v, length)
        open_memory_keys = update.write(state.memory_keys, memory_keys, length)
        used = update.mask.size(-1)
        out = local_attention(
            rotate(q, (cos, sin)),
            keys[:, :, :used],
            values[:, :, :used],
            backend=self.backend,
            mask=update.mask,
        )
        memory = state.memory
        if self.config.memory != "none":
            out = gated_read(q, out, self.gate, *memory)
            memory = self._write_full_segments(memory, open_memory_keys, values, update)
        index = update.last.clamp(min=0)[:, None, None, None]
        newest = k.gather(2, index.expand(-1, k.size(1), 1, k.size(3))).squeeze(2)
        last_key = torch.where(update.last[:, None, None] < 0, previous, newest)
        after = LayerState(memory, keys, values, open_memory_keys, last_key)
        return self.o_proj(out.transpose(1, 2).flatten(2)), after

    def _write_full_segments(
        self, memory: Memory, keys: Tensor, values: Tensor, update: CacheUpdate
    ) -> Memory:
        """The memory after the segments that `update` completes; other rows keep theirs."""
        if update.completes is None or self.config.memory == "none":
            return memory
        keys, values = (x[:, :, : self.config.segment_length] for x in (keys, values))
        updated = update_memory(memory, keys, values, self.config.memory)
        return Memory(
            *(
                torch.where(update.completes.reshape(-1, *[1] * (old.dim() - 1)), new, old)
                for old, new in zip(memory, updated, strict=True)
            )
        )


class Mlp(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to the same shape."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

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
        update: CacheUpdate | None,
    ) -> tuple[Tensor, LayerState]:
        """[B, T, hidden] to the same shape, and the layer's state after it.

        With `update` the tokens lie in the open segment of each row; without it they start on a
        segment border.
        """
        normed = self.input_layernorm(x)
        if update is not None and state is not None:
            attended, after = self.self_attn.advance(normed, rope, state, update)
        else:
            attended, after = self.self_attn(normed, rope, state, reset)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), after


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

    def forward(
        self,
        input_ids: Tensor,
        states: tuple[LayerState, ...] | None,
        reset: Tensor | None,
        update: CacheUpdate | None,
    ) -> tuple[Tensor, tuple[LayerState, ...]]:
        """[B, T] ids to [B, T, hidden], and the layers' states after them."""
        x = self.embed_tokens(input_ids)
        rope, after = (self.cos, self.sin), []
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        for index, layer in enumerate(self.layers):
            inputs = (x, rope, None if states is None else states[index], reset, update)
            # No layer draws random numbers, so there is no generator state to restore.
            x, new = (
                checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
                if recompute
                else layer(*inputs)
            )
            after.append(new)
        return self.norm(x), tuple(after)
