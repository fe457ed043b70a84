"""The layers of an Infini-Llama, and the stack of them between embedding and output layer."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from infini_model.config import AttentionBackend, ModelConfig
from infini_model.model.cache import CacheUpdate
from infini_model.model.kernels.attention import local_attention
from infini_model.model.kernels.compile import compile_in_training
from infini_model.model.memory import RULES
from infini_model.model.precision import product_input
from infini_model.model.rotary import Rope, query_scale, rope_tables, rotate
from infini_model.model.state import LayerState, State
from infini_model.model.window import Sight, Window, segmented

# The parts of the attention beside a token's own segment, which may be knocked out.
Part = Literal["memory", "window"]


class LayerContext(NamedTuple):
    """The inputs that layers share; those without RoPE have other values of rope and query_scale.

    Attributes:
        window: What is in sight.
        rope: (cos, sin), each [k + n · L + L, D], by position relative to the segment; see
            `Window.attend`.
        document_starts: [B, segments] bool, true where a segment starts a new document; None means
            that none does.
        sight: What the segments see beside themselves; None if that is nothing.
        update: Where the tokens go in the open segment of each row; None if they start on a segment
            border.
        streams: The first B / streams rows are written to the memory, which all rows read.
        keep_state: Whether there is a state after the pass.
        without_memory: Whether the memory is knocked out: nothing is read from it.
        query_scale: Factor of the queries; see `infini_model.model.rotary.query_scale`.
    """

    window: Window
    rope: Rope
    document_starts: Tensor | None = None
    sight: Sight | None = None
    update: CacheUpdate | None = None
    streams: int = 1
    keep_state: bool = True
    without_memory: bool = False
    query_scale: float = 1.0


class Norm(nn.RMSNorm):
    """RMSNorm of what a product returns, in the dtype of the weight."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] of any floating-point dtype to the same shape."""
        return super().forward(x.to(self.weight.dtype))


class Attention(nn.Module):
    """Grouped-query attention: a window and a memory; see `infini_model.model.attention`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = config.num_attention_heads * self.head_dim
        kv_width = config.key_value_heads * self.head_dim
        self.memory = None if config.memory == "none" else RULES[config.memory](config)
        bias = config.attention_bias or config.qkv_bias
        self.q_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm != "none":
            widths = (width, kv_width) if config.qk_norm == "projection" else (self.head_dim,) * 2
            self.q_norm, self.k_norm = (Norm(each, eps=config.rms_norm_eps) for each in widths)

    def project(self, x: Tensor, query_scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, T, D], keys and values [B, H_kv, T, D] of `x` [B, T, hidden]."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = (
                norm(y.unflatten(-1, (-1, norm.weight.numel()))).flatten(-2).to(y.dtype)
                for norm, y in ((self.q_norm, q), (self.k_norm, k))
            )
        if query_scale != 1.0:
            q = q * query_scale
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (q, k, v))
        return q, k, v

    def forward(
        self, x: Tensor, context: LayerContext, state: LayerState | None
    ) -> tuple[Tensor, LayerState | None]:
        """Attend to `x` [B, T, hidden], all segments at once; with an update as `advance`.

        Without one `x` starts on a segment border. With several streams, the state is that of the
        rows that are written.
        """
        if context.update is not None and state is not None:
            return self.advance(x, context, context.update, state)
        window, rope, streams, tokens = context.window, context.rope, context.streams, x.size(1)
        q, k, v = self.project(x, context.query_scale)
        # Not a chunk of a single stream: its backward pass would copy it.
        keys, values, written = (y if streams == 1 else y.chunk(streams)[0] for y in (k, v, x))
        earlier, rule_state = None, None
        if state is not None:
            earlier, rule_state = window.earlier(state.keys, state.values, rope), state.rule
        # A pass of less than a segment is no longer than itself, unless it sees whole ones.
        length = min(window.segment_length, tokens) if earlier is None else window.segment_length
        queries, local_keys, local_values = (segmented(y, length) for y in (q, k, v))
        out = window.attend(
            *(queries, local_keys, local_values, rope),
            tokens=tokens,
            sight=context.sight,
            earlier=earlier,
        )
        after = None
        if self.memory is not None and not context.without_memory:
            chunk = (written, q, keys, values, out)
            out, after = self.memory(
                *chunk, rule_state, context.document_starts, keep_state=context.keep_state
            )
        out = self.o_proj(out.permute(0, 1, 3, 2, 4).flatten(3).flatten(1, 2)[:, :tokens])
        if not context.keep_state:
            return out, None
        caches = window.carried(keys, values, rope, context.sight, earlier)
        return out, LayerState(*caches, after)

    def advance(
        self, x: Tensor, context: LayerContext, update: CacheUpdate, state: LayerState
    ) -> tuple[Tensor, LayerState]:
        """Attend to `x` [B, T, hidden], which lies in the open segment of each row."""
        window, (cos, sin) = context.window, context.rope
        kept, length = window.kept, window.segment_length
        q, k, v = self.project(x, context.query_scale)
        # Padding has no position: it gets some valid angle, and its result is ignored.
        rows = kept + update.slots.clamp(max=length - 1)
        rope = (cos[rows].unsqueeze(1), sin[rows].unsqueeze(1))
        keys = update.write(state.keys, rotate(k, rope), kept)
        values = update.write(state.values, v, kept)
        used = update.mask.size(-1)
        out = local_attention(
            rotate(q, rope),
            keys[:, :, :used],
            values[:, :, :used],
            backend=window.backend,
            mask=update.mask,
        )
        after = None
        if self.memory is not None and state.rule is not None:
            chunk = (x, q, k, values[:, :, kept:], out)
            # By its forward: hooks that bring a module's weights are called there.
            out, after = self.memory(*chunk, state.rule, update)
        if update.completes is not None:
            keys, values = window.shifted(
                keys, values, context.rope, update.completes, update.is_first
            )
        return self.o_proj(out.transpose(1, 2).flatten(2)), LayerState(keys, values, after)


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
    """Attention and feed-forward, each added to the residual stream.

    The input of each is normed or, with `post_norm`, its output.

    Attributes:
        compiled: Whether training compiles `attend`; False by default.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.compiled, self.post_norm = False, config.post_norm
        width, eps = config.hidden_size, config.rms_norm_eps
        if not self.post_norm:
            self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(width, eps=eps)
        self.mlp = Mlp(config)
        if self.post_norm:
            self.post_feedforward_layernorm = Norm(width, eps=eps)

    def forward(
        self, x: Tensor, context: LayerContext, state: LayerState | None
    ) -> tuple[Tensor, LayerState | None]:
        """[B, T, hidden] to the same shape, and the layer's state after it."""
        x, normed, after = self.attend(x, context, state)
        added = self.mlp(normed)
        return x + (self.post_feedforward_layernorm(added) if self.post_norm else added), after

    # FSDP gathers the feed-forward when it is called, which cannot be compiled.
    @compile_in_training
    def attend(
        self, x: Tensor, context: LayerContext, state: LayerState | None
    ) -> tuple[Tensor, Tensor, LayerState | None]:
        """The residual stream after the attention, the feed-forward's input, and the state."""
        taken = product_input(x if self.post_norm else self.input_layernorm(x))
        attended, after = self.self_attn(taken, context, state)
        if self.post_norm:
            x = x + self.post_attention_layernorm(attended)
            return x, product_input(x), after
        x = x + attended
        return x, product_input(self.post_attention_layernorm(x)), after


class Decoder(nn.Module):
    """Embedding, layers and final norm: everything but the output layer.

    Attributes:
        recomputed_layers: How many layers training recomputes in the backward pass, of which it
            keeps only the inputs (Chen et al., arXiv 1604.06174): the first, as what the others
            keep is free again when these are recomputed. 0 by default.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, vocab_size: int, backend: AttentionBackend) -> None:
        super().__init__()
        size = vocab_size, config.hidden_size
        # To draw weights on `meta`, PyTorch would load its compiler, in seconds.
        undrawn = torch.empty(size) if torch.get_default_device().type == "meta" else None
        self.embed_tokens = nn.Embedding(*size, _weight=undrawn)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        sizes = config.segment_length, config.window_segments, config.window_sinks
        self.window = Window(*sizes, causal=not config.bidirectional, backend=backend)
        self.tabulate_rope(config)
        self.recomputed_layers = 0
        self.no_rope_layer_interval = config.no_rope_layer_interval
        self.query_scale = query_scale(config.rope_scaling)

    def tabulate_rope(self, config: ModelConfig) -> None:
        """Compute the rotary embedding, which no file holds, on the CPU."""
        shape = config.segment_length, config.head_dim, config.rope_theta, config.rope_scaling
        cos, sin = rope_tables(*shape, before=self.window.kept)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

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
        state: State | None = None,
        document_starts: Tensor | None = None,
        update: CacheUpdate | None = None,
        *,
        streams: int = 1,
        keep_state: bool = True,
        without: Part | None = None,
    ) -> tuple[Tensor, tuple[LayerState, ...]]:
        """[B, T] ids to [B, T, hidden], and the layers' states after them, if they are to be kept.

        `document_starts`, `update`, `streams` and `keep_state` are those of `LayerContext`;
        `without` is the part of the attention that is knocked out.
        """
        # Frozen by LoRA, the embedding is of 16 bits.
        x = self.embed_tokens(input_ids).to(self.norm.weight.dtype)
        after = list[LayerState]()
        window, sight = self.window, None
        if without == "window":
            window = window._replace(segments=0, sinks=0)
        if update is None and window.kept:
            rows = len(input_ids) // streams
            before = torch.zeros(rows, dtype=torch.int64) if state is None else state.position
            before = (before // window.segment_length).to(input_ids.device)
            sight = window.sight(document_starts, before, input_ids.size(1))
        context = LayerContext(
            *(window, (self.cos, self.sin), document_starts, sight, update, streams, keep_state),
            without_memory=without == "memory",
            query_scale=self.query_scale,
        )
        every = self.no_rope_layer_interval
        unturned = (torch.ones_like(self.cos), torch.zeros_like(self.sin)) if every else None
        trains = self.training and torch.is_grad_enabled()
        for index, layer in enumerate(self.layers):
            own = context
            if unturned is not None and (index + 1) % every == 0:
                own = context._replace(rope=unturned, query_scale=1.0)
            inputs = (x, own, None if state is None else state.layers[index])
            x, new = (
                checkpoint(layer, *inputs, use_reentrant=False)  # draws dropout's numbers again
                if trains and index < self.recomputed_layers
                else layer(*inputs)
            )
            if keep_state:
                after.append(new)
        return self.norm(x), tuple(after)
