"""config.json: Hugging Face's fields of a Llama, and ours under one key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from infini_model.config import ModelConfig
from infini_model.runtime.errors import CheckpointError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

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
_INFINI_FIELDS = ("segment_length", "memory", "memory_key_shift")
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)


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
    if tree.get("model_type") != "llama":
        raise CheckpointError(f"{path}: model_type is {tree.get('model_type')!r}, needs 'llama'")
    missing = [name for name in _REQUIRED if name not in tree]
    if missing:
        raise CheckpointError(f"{path}: {missing[0]} is missing")
    for name, only in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if tree.get(name, only) != only:
            raise CheckpointError(f"{path}: {name} is {tree[name]!r}, only {only!r} is supported")


def read_config(folder: Path, overrides: Mapping[str, object]) -> ModelConfig:
    """The `ModelConfig` of a folder, with `overrides` applied.

    For a plain Llama, segment_length is its maximum context length, so that it behaves as before
    unless an override changes that.

    Raises:
        CheckpointError: The folder does not exist, holds another model, or has an invalid value.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    tree = read_json(path)
    _check_architecture(tree, path)
    fields = _LLAMA_DEFAULTS | {name: tree[name] for name in _LLAMA_FIELDS if name in tree}
    if tree.get("head_dim") is not None:
        fields["head_dim"] = tree["head_dim"]
    fields |= _rope_fields(tree, path)
    infini = tree.get("infini_attention", {})
    if not isinstance(infini, dict):
        raise CheckpointError(f"{path}: infini_attention holds {infini!r}, needs a mapping")
    fields["segment_length"] = tree.get("max_position_embeddings", 2048)
    fields |= {name: infini[name] for name in _INFINI_FIELDS if name in infini}
    try:
        return ModelConfig.model_validate(fields | dict(overrides))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "model"
        raise CheckpointError(f"{path}: {key}: {first['msg']}") from error


def config_json(config: ModelConfig, dtype: torch.dtype) -> dict[str, object]:
    """The contents of config.json for a model whose weights have `dtype`."""
    fields: dict[str, object] = {name: getattr(config, name) for name in _LLAMA_FIELDS}
    scaling = None if config.rope_scaling is None else config.rope_scaling.model_dump()
    return fields | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "infini_attention": {name: getattr(config, name) for name in _INFINI_FIELDS},
    }
