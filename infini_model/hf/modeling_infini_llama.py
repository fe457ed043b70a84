"""Infini-Llama in plain PyTorch: a Llama with a compressive memory (arXiv 2404.07143, 2402.04347).

Each head attends exactly to a window, its segment and some before it, and reads all that is older
from a memory of constant size. The package infini-llama has a faster class: `infini_model.hf`.
"""

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from transformers import GenerationMixin, LlamaConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.utils import can_return_tuple

# The cache has two names in the releases of transformers.
CACHE = next(n for n in ("cache", "past_key_values") if n in CausalLMOutputWithPast.__annotations__)
SIZES = ("segment_length", "window_segments", "window_sinks")
KIND = {"window_segments": 0, "window_sinks": 0, "memory": "residual"}
UNSUPPORTED = ("inputs_embeds", "output_attentions", "output_hidden_states")
PACKED = ("cu_seq_lens_q", "seq_idx")
STARTS = {"memory_key_shift": 0.5, "memory_query_shift": 0.5}


class InfiniLlamaConfig(LlamaConfig):
    """The fields of a Llama, those in which its kind differs, and `infini_attention`."""

    model_type = "infini_llama"
    base_model_tp_plan = None
    infini_attention: dict | None = None
    qkv_bias: bool = False
    qk_norm: str = "none"
    post_norm: bool = False
    no_rope_layer_interval: int = 0

    def validate_architecture(self):
        """Accept any head_dim."""

    @property
    def attention(self):
        """The fields of `infini_attention`, with defaults for those that it lacks."""
        return (
            {"segment_length": self.max_position_embeddings} | KIND | (self.infini_attention or {})
        )


class InfiniLlamaCache(Cache):
    """The memory and the window after some texts; `length` counts their tokens, with padding."""

    is_compileable, is_croppable, is_linear, _is_user_defined = False, False, (False,), True

    def __init__(self):
        super().__init__(layers=[])
        self.state, self.length = None, 0

    def get_seq_length(self, layer_idx=0):
        return self.length

    def crop(self, *args):
        raise ValueError("a memory cannot forget its last tokens; copy the cache beforehand")

    def batch_select_indices(self, indices):
        self.state = tree_map_only(torch.Tensor, lambda x: x[indices.to(x.device)], self.state)

    def batch_repeat_interleave(self, repeats):
        repeat = torch.Tensor, lambda x: x.repeat_interleave(repeats, 0)
        self.state = tree_map_only(*repeat, self.state)

    reset, reorder_cache = __init__, batch_select_indices


def chosen(rows, new, old):
    """`new` in the `rows` [B] that are true, `old` in the others."""
    return torch.where(rows.view(-1, *[1] * (old.dim() - 1)), new.to(old.dtype), old)


def rotated(x, cos, sin):
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def features(x):
    return torch.cat(((2 * x.float()).softmax(-1), (-2 * x.float()).softmax(-1)), -1)


class InfiniLlamaAttention(nn.Module):
    """A window of exact attention, and a memory; parameters are named as in the files."""

    def __init__(self, config, layer):
        super().__init__()
        self.own, self.width = config.attention, config.head_dim
        kind, every = self.own["memory"], config.no_rope_layer_interval
        if kind not in ("residual", "none") or self.own.get("bidirectional"):
            raise ValueError(f"infini_attention: {self.own} is not supported by this file")
        self.length, segments, self.sinks = (self.own[name] for name in SIZES)
        self.kept = self.sinks + segments * self.length
        self.is_rotated = not every or (layer + 1) % every != 0
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        hidden, bias = config.hidden_size, config.attention_bias or config.qkv_bias
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            setattr(self, f"{name}_proj", nn.Linear(hidden, count * self.width, bias=bias))
            size = self.width if config.qk_norm == "head" else count * self.width
            if name != "v" and config.qk_norm != "none":
                setattr(self, f"{name}_norm", LlamaRMSNorm(size, eps=config.rms_norm_eps))
        self.o_proj = nn.Linear(heads * self.width, hidden, bias=config.attention_bias)
        shapes = {"memory_weight": (heads, self.width), "memory_write_gate": (kv_heads, hidden)}
        shapes["memory_forget_gate"] = kv_heads, hidden
        shapes |= {"memory_key_shift": (kv_heads,), "memory_query_shift": (heads,)}
        for name, shape in shapes.items():
            if kind != "none" and self.own.get(name, name != "memory_query_shift"):
                self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def start(self, q, k):
        """Remember nothing, as before the first token."""
        keys = k.new_zeros(*k.shape[:2], self.kept + self.length, self.width)
        kv = k.new_zeros(*k.shape[:2], 2 * self.width, self.width, dtype=torch.float32)
        state = {"keys": keys, "values": keys, "kv": kv, "pending": kv, "fading": kv[..., :1, :1]}
        return state | {"key": keys[:, :, 0], "query": torch.zeros_like(q[:, :, 0])}

    def forward(self, x, at, state):
        """Attend to `x` [B, T, hidden], whose tokens are at `at["slots"]` of the open segments."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if hasattr(self, "q_norm"):
            q = self.q_norm(q.unflatten(-1, (-1, len(self.q_norm.weight)))).flatten(-2)
            k = self.k_norm(k.unflatten(-1, (-1, len(self.k_norm.weight)))).flatten(-2)
        q, k, v = (y.unflatten(-1, (-1, self.width)).transpose(1, 2) for y in (q, k, v))
        state = self.start(q, k) if state is None else state
        k, v = k.to(state["keys"].dtype), v.to(state["keys"].dtype)  # autocast has its own
        cos, sin, scale = at["rope"] if self.is_rotated else at["unrotated"]
        q, slots = q * scale, self.kept + at["slots"]
        index = slots[:, None, :, None].expand_as(k)
        keys, values = state["keys"].scatter(2, index, k), state["values"].scatter(2, index, v)
        near = rotated(q, cos[slots][:, None], sin[slots][:, None]), rotated(keys, cos, sin), values
        out = functional.scaled_dot_product_attention(*near, at["mask"], enable_gqa=True)
        after = {"keys": self.shifted(keys, at), "values": self.shifted(values, at)}
        if self.own["memory"] != "none":
            with torch.autocast(x.device.type, enabled=False):  # the memory is float32
                out = self.read(self.with_previous(q, "query", at, state), out, state["kv"])
                after |= self.write(x, self.with_previous(k, "key", at, state), v, at, state)
            after |= {"key": k[:, :, -1], "query": q[:, :, -1]}
        state = state | {name: chosen(at["reads"], x, state[name]) for name, x in after.items()}
        return self.o_proj(out.transpose(1, 2).flatten(2)), state

    def shifted(self, x, at):
        """Make a segment that is full an earlier one, among keys or values."""
        sinks, opened = self.sinks, x[:, :, self.kept :]
        first = chosen(at["is_first"], opened[:, :, :sinks], x[:, :, :sinks])
        earlier = x[:, :, sinks + self.length : self.kept + self.length]
        return chosen(at["completes"], torch.cat((first, earlier, opened), 2), x)

    def with_previous(self, x, name, at, state):
        """Mix the key or query of each token with that of the token before it in the text."""
        share = getattr(self, f"memory_{name}_shift", None)
        if share is None:
            return x
        before = torch.cat((state[name].unsqueeze(2).to(x.dtype), x[:, :, :-1]), 2)
        follows = (at["slots"] > 0) | ~at["is_first"][:, None]
        share = share.to(x.dtype)[:, None, None] * follows[:, None, :, None]
        return x + share * (before - x)

    def read(self, q, local, kv):
        """Add what `q` reads from the memory to the attention of the window, [B, H, T, D]."""
        found = features(q).reshape(*kv.shape[:2], -1, kv.size(2)) @ kv
        found = functional.rms_norm(found.view(q.shape), q.shape[-1:], eps=1e-6)
        return (local + self.memory_weight.float()[:, None] * found).to(local.dtype)

    def write(self, x, k, v, at, state):
        """Write the step to what is pending, and that to the memory where the segment is full."""
        weights = torch.cat((self.memory_write_gate, self.memory_forget_gate)).to(x.dtype)
        write, fade = functional.linear(x, weights).float().transpose(1, 2).chunk(2, 1)
        kept = -functional.softplus(fade - 9.0)  # log of the share of what is older that remains
        left = kept.sum(-1, keepdim=True).unsqueeze(-1)
        share = (write + 2.2).sigmoid() * (left[..., 0] - kept.cumsum(-1)).exp()
        pending = state["pending"] * left.exp() + features(k).mT @ (v.float() * share[..., None])
        fading, is_full = state["fading"] + left, at["completes"]
        kv = chosen(is_full, state["kv"] * fading.exp() + pending, state["kv"])
        pending, fading = (chosen(is_full, x * 0, x) for x in (pending, fading))
        return {"kv": kv, "pending": pending, "fading": fading}


class InfiniLlamaLayer(nn.Module):
    """Attention and feed-forward; normed are their inputs or, with `post_norm`, their outputs."""

    def __init__(self, config, layer):
        super().__init__()
        self.self_attn, self.mlp = InfiniLlamaAttention(config, layer), LlamaMLP(config)
        self.post_norm, size, eps = config.post_norm, config.hidden_size, config.rms_norm_eps
        self.post_attention_layernorm = LlamaRMSNorm(size, eps=eps)
        name = "post_feedforward_layernorm" if self.post_norm else "input_layernorm"
        setattr(self, name, LlamaRMSNorm(size, eps=eps))

    def forward(self, x, at, state):
        out, state = self.self_attn(x if self.post_norm else self.input_layernorm(x), at, state)
        if self.post_norm:
            x = x + self.post_attention_layernorm(out)
            return x + self.post_feedforward_layernorm(self.mlp(x)), state
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), state


def places(own, rotary, x, position, reads):
    """Place tokens `x` [B, T, hidden] in the open segments, and say what they see."""
    (length, segments, sinks), index = (own[n] for n in SIZES), torch.arange(x.size(1)).to(x.device)
    age, slots = position[:, None] // length, position[:, None] % length + index
    distance = torch.arange(segments, 0, -1, device=x.device).repeat_interleave(length)
    # Until they are out of sight, the first tokens are among those of their segment.
    older = torch.cat(((age > segments).expand(-1, sinks), distance <= age), 1)[:, None]
    near = torch.arange(length, device=x.device) <= slots[..., None]
    relative = torch.arange(-older.size(2), length, device=x.device)
    cos, sin = (y[0] / rotary.attention_scaling for y in rotary(x.float(), relative[None]))
    return {
        "slots": slots,
        "reads": reads,
        "completes": slots[:, -1] == length - 1,
        "is_first": age[:, 0] == 0,
        "mask": torch.cat((older.expand(-1, x.size(1), -1), near), 2)[:, None],
        "rope": (cos, sin, rotary.attention_scaling**2),
        "unrotated": (torch.ones_like(cos), torch.zeros_like(sin), 1.0),
    }


class PlainInfiniLlamaForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model that remembers texts of any length in a cache of constant size."""

    config_class = InfiniLlamaConfig
    base_model_prefix = "model"
    _no_split_modules = ["InfiniLlamaLayer"]
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _is_stateful = _supports_sdpa = True

    def __init__(self, config):
        config.infini_attention = config.attention
        super().__init__(config)
        size, layers = config.hidden_size, range(config.num_hidden_layers)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.model.layers = nn.ModuleList(InfiniLlamaLayer(config, each) for each in layers)
        self.model.norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.model.rotary_emb = LlamaRotaryEmbedding(config)
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)
        self.post_init()

    def read(self, ids, counts, state, is_kept):
        """Read `counts` [B] of `ids` [B, T]: the inputs of `lm_head`, and the state after them."""
        model, own, hidden, start = self.model, self.config.attention, [], 0
        if state is None:
            state = counts * 0, [None] * len(model.layers)
        while start < ids.size(1):  # to where a segment or a row ends
            position, layers, left = state[0], [*state[1]], counts - start
            room = own["segment_length"] - int((position % own["segment_length"]).max())
            width = min(room, int(torch.where(left > 0, left, ids.size(1) - start).min()))
            x = model.embed_tokens(ids[:, start : start + width])
            at = places(own, model.rotary_emb, x, position, left > 0)
            for number, layer in enumerate(model.layers):
                x, layers[number] = layer(x, at, layers[number])
            hidden.append(model.norm(x))
            state, start = (position + width * (left > 0), layers), start + width
        return torch.cat(hidden, 1), state

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, InfiniLlamaAttention):
            for name, parameter in module.named_parameters(recurse=False):
                nn.init.constant_(parameter, STARTS.get(name, 0.0))

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args):
        if generation_config.use_cache and model_kwargs.get(CACHE) is None:
            model_kwargs[CACHE] = InfiniLlamaCache()

    @can_return_tuple
    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, cache=None, use_cache=None,
        past_key_values=None, labels=None, logits_to_keep=0, **kwargs
    ):  # fmt: skip
        """As a Llama's: padding may be anywhere, and labels are shifted here."""
        for name in UNSUPPORTED + PACKED:
            if isinstance(given := kwargs.pop(name, None), torch.Tensor) or given:
                raise ValueError(f"{name}: not supported")
        cache = next((x for x in (cache, past_key_values) if x is not None), InfiniLlamaCache())
        if not isinstance(cache, InfiniLlamaCache):
            raise TypeError(f"{CACHE}: expected an InfiniLlamaCache, got {type(cache).__name__}")
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        real = mask[:, -input_ids.size(1) :].long().expand_as(input_ids)
        order = real.argsort(dim=1, descending=True, stable=True)  # padding goes to the end
        pairs = real[:, 1:] * real[:, :-1] > 0
        if position_ids is not None and bool((pairs & (position_ids.diff(dim=1) < 1)).any()):
            raise ValueError("position_ids: several texts in one row are not supported")
        state, ids = cache.state, input_ids.gather(1, order)
        hidden, cache.state = self.read(ids, real.sum(1), state, use_cache)
        cache.length += input_ids.size(1)
        hidden = torch.zeros_like(hidden).scatter(1, order[..., None].expand_as(hidden), hidden)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, logits.size(-1), **kwargs)
        return CausalLMOutputWithPast(loss, logits, **{CACHE: cache if use_cache else None})
