"""Hugging Face Llama folders in and out: config.json beside safetensors, whole or in shards.

What Infini-attention adds stands in config.json under the one key `infini_attention`, which
`transformers` carries along and ignores, and in the tensors `…self_attn.gate` and
`…self_attn.memory_key_shift`. Nothing is unpickled.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from infini_model.config import ModelConfig
from infini_model.runtime.errors import CheckpointError
from infini_model.runtime.storage import atomic_folder, dump_json

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
MEMORY_TENSORS = ("self_attn.gate", "self_attn.memory_key_shift")

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
# Hugging Face's, where ours differs and a folder may leave the field out.
_LLAMA_DEFAULTS: dict[str, object] = {"rms_norm_eps": 1e-6}
_INFINI_FIELDS = ("segment_length", "memory", "memory_key_shift")
_NEEDED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)

# As safetensors names them; integers and float8 are quantised weights, nothing without scales.
_DTYPES = ("F64", "F32", "F16", "BF16")

log = logging.getLogger(__name__)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is no JSON: {error}") from error
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path}: holds {type(tree).__name__}, needs a mapping")
    return tree


def _rope_fields(tree: dict[str, Any], path: Path) -> dict[str, object]:
    """rope_theta and rope_scaling, from the fields of today or of yesterday."""
    parameters = tree.get("rope_scaling") or tree.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise CheckpointError(f"{path}: rope_parameters holds {parameters!r}, needs a mapping")
    scaling = {"original_max_position_embeddings": tree.get("max_position_embeddings")} | parameters
    theta = scaling.pop("rope_theta", tree.get("rope_theta", 10_000.0))
    old_kind = scaling.pop("type", "default")
    kind = scaling.setdefault("rope_type", old_kind)
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "llama3":
        raise CheckpointError(f"{path}: rope_scaling of type {kind!r} is not supported")
    return {"rope_theta": theta, "rope_scaling": scaling}


def _refuse_other_models(tree: dict[str, Any], path: Path) -> None:
    if tree.get("model_type") != "llama":
        raise CheckpointError(f"{path}: model_type is {tree.get('model_type')!r}, needs 'llama'")
    missing = [name for name in _NEEDED if name not in tree]
    if missing:
        raise CheckpointError(f"{path}: {missing[0]} is missing")
    for name, only in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if tree.get(name, only) != only:
            raise CheckpointError(f"{path}: {name} is {tree[name]!r}, only {only!r} is supported")


def read_config(folder: Path, overrides: Mapping[str, object]) -> ModelConfig:
    """The `ModelConfig` of a folder, with `overrides` laid over it.

    A folder that says nothing of segments gets its own longest context as segment_length: it
    behaves as the Llama it was until an override says otherwise.

    Raises:
        CheckpointError: No such folder, no such model, or a value that does not fit.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file")
    tree = _read_json(path)
    _refuse_other_models(tree, path)
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


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, all of them present."""
    names = [WEIGHTS]
    index = folder / INDEX
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: weight_map is missing")
        names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{index}: {name!r} is no plain file name")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: there is no such file")
    return [folder / name for name in names]


def _tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one file that the model takes, each checked before it is read."""
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                if name not in shapes:
                    if not _left_out(name):
                        raise CheckpointError(f"{path}: tensor {name} is not of this model")
                    continue
                stored = file.get_slice(name)
                if stored.get_dtype() not in _DTYPES:
                    raise CheckpointError(
                        f"{path}: tensor {name}: expected dtype {', '.join(_DTYPES)}, "
                        f"got {stored.get_dtype()}"
                    )
                shape = tuple(stored.get_shape())
                if shape != shapes[name]:
                    raise CheckpointError(
                        f"{path}: tensor {name}: expected shape {list(shapes[name])}, "
                        f"got {list(shape)}"
                    )
                yield name, file.get_tensor(name).to(dtype)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: is no readable safetensors file: {error}") from error


def _left_out(name: str) -> bool:
    """Whether a tensor that the model lacks may stay unread.

    The output layer of a tied model is its embedding; rotary frequencies, which old folders hold,
    are computed; a memory's own tensors are no use to a model that was asked to have none.
    """
    return name == "lm_head.weight" or name.endswith((*MEMORY_TENSORS, "rotary_emb.inv_freq"))


def read_tensors(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """All tensors that `shapes` names, in `dtype`, whatever floating-point type is stored.

    A folder without any gate (or key shift) is a plain Llama: the gates start at 0 and the key
    shift at μ = 0, the paper's form, which a line in the log says.

    Raises:
        CheckpointError: A file or a tensor is missing, damaged, superfluous, misshapen or
            quantised.
    """
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        tensors.update(_tensors(path, shapes, dtype))
    missing = [name for name in shapes if name not in tensors]
    for kind in MEMORY_TENSORS:
        own = [name for name in shapes if name.endswith(kind)]
        if own and not any(name in tensors for name in own):
            log.warning("%s: has no %s; each starts at 0", folder, kind.partition(".")[2])
            tensors |= {name: torch.zeros(shapes[name], dtype=dtype) for name in own}
            missing = [name for name in missing if name not in own]
    if missing:
        raise CheckpointError(f"{folder}: tensor {missing[0]} is missing")
    return tensors


def config_json(config: ModelConfig, dtype: torch.dtype) -> dict[str, object]:
    """What config.json says of a model: Hugging Face's fields, and ours under one key."""
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


def _shards(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """The tensors in order, in groups of at most `limit` bytes (or one tensor)."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.contiguous()
        size += tensor.nbytes
    return shards


def _refuse_strangers(folder: Path) -> None:
    """Raise if replacing `folder` would delete anything but a checkpoint."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.name not in (CONFIG, INDEX) and path.suffix != ".safetensors":
            raise CheckpointError(f"{folder}: holds {path.name}, which would be lost; name another")


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file. Raises `OSError` where the system refuses, as for a full disk."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        # It passes on what the system said as text alone.
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        raise


def write_checkpoint(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a Hugging Face Llama folder, complete or not at all; a checkpoint there is replaced.

    Args:
        folder: Where it appears.
        config: The model's shape.
        tensors: Parameters by name, without the output layer if it is tied; they may be on any
            device.
        shard_bytes: Largest file; more tensors go into shards with an index.

    Raises:
        CheckpointError: `folder` holds files of another kind, which would be lost.
        UserError: The folder cannot be written.
    """
    _refuse_strangers(folder)
    with atomic_folder(folder) as temporary:
        write_files(temporary, config, tensors, shard_bytes=shard_bytes)


def write_files(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """The files of `write_checkpoint`, into a folder that nobody sees yet. Raises `OSError`."""
    shards = _shards(tensors, shard_bytes)
    names = [WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_tensors(shard, folder / name)
    if len(shards) > 1:
        weight_map = {t: name for name, s in zip(names, shards, strict=True) for t in s}
        total = sum(tensor.nbytes for tensor in tensors.values())
        dump_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    dtype = next(iter(tensors.values())).dtype
    dump_json(folder / CONFIG, config_json(config, dtype))
