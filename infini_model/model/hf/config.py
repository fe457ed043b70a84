"""config.json: Hugging Face's fields of a Llama or one of its kind, and ours under one key.

A model calls itself what computes the same: a Llama, a Qwen2, … With a memory or a window, or a
combination that none of them has, it is an `infini_llama` with the fields of a Llama, so that no
program takes it for a model that computes something else.

LLaDA (arXiv 2502.09992) is a Llama in which every position sees the whole sequence. Its config.json
has the fields of OLMo, of which only the combination that is a Llama is supported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, PositiveInt, ValidationError

from infini_model.config import ModelConfig
from infini_model.config.model import TOKENIZER_NAME
from infini_model.runtime.errors import CheckpointError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION, ADAPTER_CONFIG = "generation_config.json", "adapter_config.json"

LONGEST_TEXT = 2**31 - 1  # of a model with a past, in 32 bits
_INFINI_FIELDS = (
    *("segment_length", "window_segments", "window_sinks"),
    *("memory", "memory_key_shift", "memory_query_shift"),
)
# Sinks of a pretrained model that is given a window: without them it is worse than without a
# window (StreamingLLM, arXiv 2309.17453).
_SINKS = 4
_ORIGINAL_LENGTH = "original_max_position_embeddings"
# Kinds of models that may have layers with a sliding window.
_SLIDING = ("mistral", "qwen2", "qwen3", "smollm3")


class _Architecture(NamedTuple):
    """How config.json describes a kind of model.

    Attributes:
        name: Of its class in `transformers`.
        names: Its name of each of our fields.
        required: What has no default, or one that is never meant.
        only: The one supported value of fields that we do not have.
        defaults: Its defaults of optional fields, where ours differ.
        fixed: Our fields that all models of this kind share.
    """

    name: str
    names: Mapping[str, str]
    required: tuple[str, ...]
    only: Mapping[str, object]
    defaults: Mapping[str, object]
    fixed: Mapping[str, object]


# Fields of a model with a memory that a Llama has no name for.
_DIFFUSION_FIELDS = ("bidirectional", "mask_token_id")
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_OPTIONAL = ("num_key_value_heads", "head_dim", "tie_word_embeddings", "initializer_range")
# In what the architectures differ; a Llama has the defaults of `ModelConfig`.
_VARIANTS = ("attention_bias", "no_rope_layer_interval", "qkv_bias", "qk_norm", "post_norm")


def _like_llama(
    name: str,
    defaults: Mapping[str, object],
    fixed: Mapping[str, object],
    variants: Sequence[str] = (),
) -> _Architecture:
    """Describe a kind of Llama: other in `fixed` always, in `variants` where config.json says so.

    `defaults` are those that are not a Llama's.
    """
    names = ("vocab_size", *_SIZES, *_OPTIONAL, "rms_norm_eps", *variants)
    return _Architecture(
        name,
        {each: each for each in names} | {"segment_length": "max_position_embeddings"},
        ("vocab_size", *_SIZES, "max_position_embeddings"),
        {"mlp_bias": False, "hidden_act": "silu"},
        {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, **defaults},
        fixed,
    )


_MISTRAL = {"max_position_embeddings": 1 << 17, "num_key_value_heads": 8, "sliding_window": 4096}
_QWEN = {"max_position_embeddings": 1 << 15, "num_key_value_heads": 32, "sliding_window": 4096}
_SMOLLM3 = {
    "max_position_embeddings": 1 << 15,
    "num_key_value_heads": 4,
    "rope_theta": 2e6,
    "tie_word_embeddings": True,
    "no_rope_layer_interval": 4,
}
_OLMO2 = {"qk_norm": "projection", "post_norm": True}
_ARCHITECTURES = {
    "llama": _like_llama("LlamaForCausalLM", {}, {}, ("attention_bias",)),
    "mistral": _like_llama("MistralForCausalLM", _MISTRAL, {}),
    "qwen2": _like_llama("Qwen2ForCausalLM", _QWEN, {"qkv_bias": True}),
    "qwen3": _like_llama(
        "Qwen3ForCausalLM", {**_QWEN, "head_dim": 128}, {"qk_norm": "head"}, ("attention_bias",)
    ),
    "smollm3": _like_llama(
        "SmolLM3ForCausalLM", _SMOLLM3, {}, ("attention_bias", "no_rope_layer_interval")
    ),
    "olmo2": _like_llama("Olmo2ForCausalLM", {"rms_norm_eps": 1e-5}, _OLMO2, ("attention_bias",)),
    "infini_llama": _like_llama("InfiniLlamaForCausalLM", {}, {}, _VARIANTS),
    "llada": _Architecture(
        "LLaDAModelLM",
        {
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
        },
        # LLaDA's defaults of these are GPT-2's values.
        (
            *("vocab_size", "d_model", "n_layers", "n_heads", "mlp_hidden_size"),
            *("block_type", "activation_type", "layer_norm_type", "rope"),
        ),
        # LLaDA-MoE has the same model_type, but other architectures.
        {
            "architectures": ["LLaDAModelLM"],
            "block_type": "llama",
            "block_group_size": 1,
            "activation_type": "silu",
            "layer_norm_type": "rms",
            "layer_norm_with_affine": True,
            "rope": True,
            **dict.fromkeys(
                ("attention_layer_norm", "bias_for_layer_norm", "input_emb_norm"), False
            ),
            **dict.fromkeys(("include_bias", "include_qkv_bias", "multi_query_attention"), False),
            **dict.fromkeys(("alibi", "scale_logits"), False),
        },
        {"weight_tying": True, "max_sequence_length": 1024},
        {},
    ),
}


class TokenIds(NamedTuple):
    """What a model's folder says about its tokens; None is what is not known or not there.

    `tokenizer` is the name of a tokenizer that has no file, "bytes".
    """

    bos: int | None = None
    eos: int | None = None
    tokenizer: str | None = None


NO_TOKENS = TokenIds()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `CheckpointError` if there is none."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: invalid JSON: {error}") from error
    return _mapping(tree, str(path))


def _mapping(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: holds {type(value).__name__}, needs a mapping")
    return value


def read_config(folder: Path, overrides: Mapping[str, object]) -> ModelConfig:
    """The `ModelConfig` of a folder, with `overrides` applied.

    For a model without segments, segment_length is its maximum context length, or its sliding
    window if that is less, so that it behaves as before unless an override changes that.

    Raises `CheckpointError` if the folder does not exist, holds another model, has an invalid
    value, or more than its sliding window would be in sight.
    """
    path = folder / CONFIG
    return parse_config(read_json(path), path, overrides)


def parse_config(
    tree: Mapping[str, Any], path: Path, overrides: Mapping[str, object]
) -> ModelConfig:
    """Return the `ModelConfig` of the object in a config.json, which messages call `path`."""
    kind = tree.get("model_type")
    if not isinstance(kind, str) or kind not in _ARCHITECTURES:
        raise CheckpointError(
            f"{path}: unsupported model_type {kind!r}; supported: {', '.join(_ARCHITECTURES)}"
        )
    known = _ARCHITECTURES[kind]
    names, stated = known.names, {**known.defaults, **tree}
    given = {name: value for name, value in stated.items() if value is not None}
    for name in known.required:
        if name not in given:
            raise CheckpointError(f"{path}: {name} is missing")
    for name, value in known.only.items():
        if given.get(name, value) != value:
            raise CheckpointError(f"{path}: {name} is {given[name]!r}, only {value!r} is supported")
    if "no_rope_layers" in given and "no_rope_layer_interval" in names:
        given["no_rope_layer_interval"] = _no_rope_interval(given["no_rope_layers"], path)
    ours: tuple[str, ...] = _INFINI_FIELDS
    if kind == "llada":
        # The vocabulary may be padded: it is the embedding that has rows.
        given.setdefault("embedding_size", given["vocab_size"])
        fields: dict[str, object] = {"bidirectional": True, "memory": "none"}
    else:
        fields = _rope_fields(given, path)
        if kind != "infini_llama" and overrides.get("window_segments"):
            fields["window_sinks"] = _SINKS
        ours += _DIFFUSION_FIELDS
    fields |= known.fixed
    fields |= {name: given[theirs] for name, theirs in names.items() if theirs in given}
    infini = _mapping(tree.get("infini_attention") or {}, f"{path}: infini_attention")
    fields |= {name: infini[name] for name in ours if name in infini}
    try:
        config = ModelConfig.model_validate({**fields, **overrides})
        most = _Sliding.model_validate(given).window(kind, config) if kind in _SLIDING else None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "model"
        if key not in {*overrides, *infini}:
            key = names.get(key, key)
        message = first["msg"].removeprefix("Value error, ")
        raise CheckpointError(f"{path}: {key}: {message}") from error
    if most is None:
        return config
    if "segment_length" not in {*overrides, *infini} and config.segment_length > most:
        config = config.updated(segment_length=most)
    if (sight := (config.window_segments + 1) * config.segment_length) > most:
        raise CheckpointError(
            f"{path}: sliding_window is {most} tokens, but segment_length × (window_segments + 1) "
            f"is {sight}"
        )
    return config


class _Sliding(BaseModel):
    """The fields by which some layers see no more than a sliding window."""

    sliding_window: PositiveInt | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None

    def window(self, kind: str, config: ModelConfig) -> int | None:
        """Return its width, or None without such layers, as `transformers` decides."""
        if kind == "mistral":
            slides = True
        elif self.layer_types is not None:
            slides = "sliding_attention" in self.layer_types
        elif kind == "smollm3":
            layers, every = config.num_hidden_layers, config.no_rope_layer_interval
            slides = self.use_sliding_window and 0 < every <= layers
        else:
            slides = self.use_sliding_window and self.max_window_layers < config.num_hidden_layers
        return self.sliding_window if slides else None


def _no_rope_interval(layers: object, path: Path) -> int:
    """Return n for a list with 0 for every n-th layer and 1 for the others, 0 for one without 0."""
    if isinstance(layers, list) and layers:
        every = layers.index(0) + 1 if 0 in layers else 0
        if layers == [int(not every or (at + 1) % every != 0) for at in range(len(layers))]:
            return every
    raise CheckpointError(f"{path}: no_rope_layers: only 0 for every n-th layer is supported")


def _rope_fields(given: dict[str, Any], path: Path) -> dict[str, object]:
    """rope_theta and rope_scaling, from the current or the older Hugging Face fields."""
    stated = given.get("rope_scaling") or given.get("rope_parameters") or {}
    scaling = {**_mapping(stated, f"{path}: rope_parameters")}
    for name, value in scaling.items():
        if isinstance(value, dict):
            raise CheckpointError(
                f"{path}: rope_parameters.{name}: only one for all layers is supported"
            )
    theta = scaling.pop("rope_theta", given.get("rope_theta", 10_000.0))
    kind = scaling.setdefault("rope_type", scaling.pop("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "linear":
        length = given.get(_ORIGINAL_LENGTH, given["max_position_embeddings"])
        scaling.setdefault(_ORIGINAL_LENGTH, length)
    return {"rope_theta": theta, "rope_scaling": scaling}


def model_type(config: ModelConfig) -> str:
    """The kind of model that config.json calls itself: the first that computes the same."""

    def computes_the_same(kind: str) -> bool:
        names, fixed = _ARCHITECTURES[kind].names, _ARCHITECTURES[kind].fixed
        plain = {**{n: ModelConfig.model_fields[n].default for n in _VARIANTS}, **fixed}
        return all(name in names or getattr(config, name) == plain[name] for name in _VARIANTS)

    if config.has_past:
        return "infini_llama"
    if not config.bidirectional:
        return next(filter(computes_the_same, _ARCHITECTURES))
    # LLaDA has names for neither a scaling nor the width of a head.
    heads_fit = config.head_dim * config.num_attention_heads == config.hidden_size
    is_llada = config.rope_scaling is None and heads_fit and computes_the_same("llada")
    return "llada" if is_llada else "infini_llama"


def config_json(config: ModelConfig, dtype: torch.dtype, tokens: TokenIds) -> dict[str, object]:
    """The contents of config.json for a model whose weights have `dtype`."""
    kind = model_type(config)
    known = _ARCHITECTURES[kind]
    names = known.names
    infini = {name: getattr(config, name) for name in _INFINI_FIELDS}
    tree: dict[str, object] = {theirs: getattr(config, ours) for ours, theirs in names.items()}
    tree |= {
        **known.only,
        "model_type": kind,
        names["num_key_value_heads"]: config.key_value_heads,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "infini_attention": infini,
        "bos_token_id": tokens.bos,
        "eos_token_id": tokens.eos,
        # LLaDA's texts are padded by their end; the default of others may be beyond the vocabulary.
        "pad_token_id": tokens.eos if kind == "llada" else None,
    }
    if config.has_past:
        tree["max_position_embeddings"] = LONGEST_TEXT
    if tokens.tokenizer is not None:
        tree[TOKENIZER_NAME] = tokens.tokenizer
    if kind == "llada":
        tree |= {
            "vocab_size": config.vocab_size,
            # LLaDA takes the two together only for as many key-value heads as heads, or one.
            "multi_query_attention": None,
            # LLaDA's default is 0.1, and this model has no dropout.
            **dict.fromkeys(("attention_dropout", "embedding_dropout", "residual_dropout"), 0.0),
        }
    else:
        if config.bidirectional:
            infini |= config.model_dump(include=set(_DIFFUSION_FIELDS))
        scaling = config.rope_scaling and config.rope_scaling.model_dump(exclude_none=True)
        tree |= {
            "architectures": [known.name],
            "rope_theta": config.rope_theta,
            "rope_scaling": scaling,
            "rope_parameters": (scaling or {"rope_type": "default"})
            | {"rope_theta": config.rope_theta},
        }
    return tree
