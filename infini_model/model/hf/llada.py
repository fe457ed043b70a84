"""Fields and tensors as they are named in LLaDA's folders (arXiv 2502.09992).

LLaDA is a Llama in which every position sees the whole sequence. Its config.json has the fields of
OLMo, of which only the combination that is a Llama is supported.
"""

from __future__ import annotations

from infini_model.config import ModelConfig

LLADA = "llada"
# LLaDA's name for each of our fields.
LLADA_FIELDS = {
    "vocab_size": "embedding_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "intermediate_size": "mlp_hidden_size",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "weight_tying",
    "initializer_range": "init_std",
    "segment_length": "max_sequence_length",
    "mask_token_id": "mask_token_id",
}
# Our fields that LLaDA has no name for.
LLADA_LACKS = ("head_dim", "rope_scaling")
# LLaDA's defaults of optional fields, where ours differ.
_DEFAULTS: dict[str, object] = {"weight_tying": True, "max_sequence_length": 1024}
# LLaDA-MoE has the same model_type, but other architectures.
LLADA_ONLY: dict[str, object] = {
    "architectures": ["LLaDAModelLM"],
    "block_type": "llama",
    "block_group_size": 1,
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "bias_for_layer_norm": False,
    "attention_layer_norm": False,
    "input_emb_norm": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "multi_query_attention": False,
    "rope": True,
    "alibi": False,
    "scale_logits": False,
}
# LLaDA's defaults of these are GPT-2's values, which are never meant.
LLADA_REQUIRED: tuple[str, ...] = (
    *("vocab_size", "d_model", "n_layers", "n_heads", "mlp_hidden_size"),
    *("block_type", "activation_type", "layer_norm_type", "rope"),
)
# LLaDA's default is 0.1, and this model has no dropout.
_NO_DROPOUT = dict.fromkeys(("attention_dropout", "embedding_dropout", "residual_dropout"), 0.0)

_OUTER_MODULES = {
    "model.embed_tokens": "model.transformer.wte",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
}
_BLOCK_MODULES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "post_attention_layernorm": "ff_norm",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}


def llada_tensor(name: str) -> str:
    """LLaDA's name of the tensor that the model calls `name`; different ones stay different."""
    module, _, parameter = name.rpartition(".")
    if module in _OUTER_MODULES:
        return f"{_OUTER_MODULES[module]}.{parameter}"
    number, _, inner = module.removeprefix("model.layers.").partition(".")
    return f"model.transformer.blocks.{number}.{_BLOCK_MODULES.get(inner, inner)}.{parameter}"


def llada_fields(tree: dict[str, object]) -> dict[str, object]:
    """Fields of `ModelConfig` from a LLaDA's config.json that has the required fields."""
    given = _DEFAULTS | {name: value for name, value in tree.items() if value is not None}
    # The vocabulary may be padded: it is the embedding that has rows.
    given.setdefault("embedding_size", tree["vocab_size"])
    fields = {ours: given[theirs] for ours, theirs in LLADA_FIELDS.items() if theirs in given}
    return fields | {"bidirectional": True, "memory": "none"}


def llada_json(config: ModelConfig) -> dict[str, object]:
    """The fields of LLaDA's config.json for a model."""
    fields = {theirs: getattr(config, ours) for ours, theirs in LLADA_FIELDS.items()}
    return (
        fields
        | LLADA_ONLY
        | _NO_DROPOUT
        | {
            "model_type": LLADA,
            "vocab_size": config.vocab_size,
            "n_kv_heads": config.key_value_heads,
            # LLaDA takes the two together only for as many key-value heads as heads, or one.
            "multi_query_attention": None,
        }
    )
