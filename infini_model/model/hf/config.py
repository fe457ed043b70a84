"""config.json: Hugging Face's fields of a Llama, or LLaDA's, and ours under one key."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError

from infini_model.config import ModelConfig
from infini_model.config.model import TOKENIZER_NAME
from infini_model.model.hf.llada import (
    LLADA,
    LLADA_FIELDS,
    LLADA_LACKS,
    LLADA_ONLY,
    LLADA_REQUIRED,
    llada_fields,
    llada_json,
    llada_tensor,
)
from infini_model.runtime.errors import CheckpointError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"

_LLAMA = "llama"
_LLAMA_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "rms_norm_eps",
    "tie_word_embeddings",
    "initializer_range",
)
# Hugging Face's defaults of optional fields, where ours differ.
_LLAMA_DEFAULTS: dict[str, object] = {"rms_norm_eps": 1e-6}
_INFINI_FIELDS = ("segment_length", "memory", "memory_key_shift", "memory_query_shift")
_LLAMA_REQUIRED: tuple[str, ...] = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)
_LLAMA_ONLY: dict[str, object] = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}


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
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path}: holds {type(tree).__name__}, needs a mapping")
    return tree


def _rope_fields(tree: dict[str, Any], path: Path) -> dict[str, object]:
    """rope_theta and rope_scaling, from the current or the older Hugging Face fields."""
    parameters = tree.get("rope_scaling") or tree.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise CheckpointError(f"{path}: rope_parameters holds {parameters!r}, needs a mapping")
    scaling = {"original_max_position_embeddings": tree.get("max_position_embeddings")} | parameters
    theta = scaling.pop("rope_theta", tree.get("rope_theta", 10_000.0))
    older_name = scaling.pop("type", "default")
    kind = scaling.setdefault("rope_type", older_name)
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "llama3":
        raise CheckpointError(f"{path}: rope_scaling of type {kind!r} is not supported")
    return {"rope_theta": theta, "rope_scaling": scaling}


def _check_architecture(tree: dict[str, Any], path: Path) -> None:
    kind, required, only = tree.get("model_type"), _LLAMA_REQUIRED, _LLAMA_ONLY
    if kind not in (_LLAMA, LLADA):
        raise CheckpointError(f"{path}: model_type is {kind!r}; {_LLAMA} and {LLADA} are read")
    if kind == LLADA:
        required, only = LLADA_REQUIRED, LLADA_ONLY
    missing = [name for name in required if tree.get(name) is None]
    if missing:
        raise CheckpointError(f"{path}: {missing[0]} is missing")
    for name, value in only.items():
        if tree.get(name) not in (None, value):
            raise CheckpointError(f"{path}: {name} is {tree[name]!r}, only {value!r} is supported")


def _llama_fields(tree: dict[str, Any], path: Path) -> dict[str, object]:
    """Fields of `ModelConfig` from a Llama's config.json."""
    fields = _LLAMA_DEFAULTS | {name: tree[name] for name in _LLAMA_FIELDS if name in tree}
    if tree.get("head_dim") is not None:
        fields["head_dim"] = tree["head_dim"]
    fields["segment_length"] = tree.get("max_position_embeddings", 2048)
    return fields | _rope_fields(tree, path)


def read_config(folder: Path, overrides: Mapping[str, object]) -> ModelConfig:
    """The `ModelConfig` of a folder, with `overrides` applied.

    For a plain Llama or a LLaDA, segment_length is its maximum context length, so that it behaves
    as before unless an override changes that.

    Raises:
        CheckpointError: The folder does not exist, holds another model, or has an invalid value.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    tree = read_json(path)
    _check_architecture(tree, path)
    is_llada = tree["model_type"] == LLADA
    fields = llada_fields(tree) if is_llada else _llama_fields(tree, path)
    infini = tree.get("infini_attention", {})
    if not isinstance(infini, dict):
        raise CheckpointError(f"{path}: infini_attention holds {infini!r}, needs a mapping")
    ours = (*_INFINI_FIELDS, *LLADA_LACKS) if is_llada else _INFINI_FIELDS
    fields |= {name: infini[name] for name in ours if name in infini}
    try:
        return ModelConfig.model_validate(fields | dict(overrides))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "model"
        if is_llada and key not in overrides:
            key = LLADA_FIELDS.get(key, key)
        raise CheckpointError(f"{path}: {key}: {first['msg']}") from error


def read_tensor_names(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The model's tensor `names` by those that they have in the files of a folder.

    Raises `CheckpointError` if config.json is missing or damaged.
    """
    if read_json(folder / CONFIG).get("model_type") == LLADA:
        return {llada_tensor(name): name for name in names}
    return {name: name for name in names}


def token_fields(tokens: TokenIds, model_type: object) -> dict[str, object]:
    """The fields of config.json that tell the tokens; a LLaDA's texts are padded by their end."""
    fields: dict[str, object] = {"bos_token_id": tokens.bos, "eos_token_id": tokens.eos}
    if model_type == LLADA:
        fields["pad_token_id"] = tokens.eos
    return fields if tokens.tokenizer is None else fields | {TOKENIZER_NAME: tokens.tokenizer}


def config_json(config: ModelConfig, dtype: torch.dtype, tokens: TokenIds) -> dict[str, object]:
    """The contents of config.json for a model whose weights have `dtype`."""
    infini = {name: getattr(config, name) for name in _INFINI_FIELDS}
    if config.bidirectional:
        tree = llada_json(config)
        infini |= config.model_dump(include=set(LLADA_LACKS))
    else:
        tree = _llama_json(config)
    return tree | {
        "torch_dtype": str(dtype).removeprefix("torch."),
        "infini_attention": infini,
        **token_fields(tokens, tree["model_type"]),
    }


def _llama_json(config: ModelConfig) -> dict[str, object]:
    """The fields of a Llama's config.json for a model."""
    fields: dict[str, object] = {name: getattr(config, name) for name in _LLAMA_FIELDS}
    scaling = None if config.rope_scaling is None else config.rope_scaling.model_dump()
    return fields | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": _LLAMA,
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": (scaling or {"rope_type": "default"})
        | {"rope_theta": config.rope_theta},
        "max_position_embeddings": config.segment_length,
    }
