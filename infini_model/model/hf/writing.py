"""Write a folder: config.json and safetensors, sharded if large."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from infini_model.config import ModelConfig
from infini_model.model.hf.config import (
    CONFIG,
    GENERATION,
    INDEX,
    NO_TOKENS,
    WEIGHTS,
    TokenIds,
    config_json,
    read_json,
    token_fields,
)
from infini_model.model.hf.llada import llada_tensor
from infini_model.runtime.errors import CheckpointError
from infini_model.runtime.storage import atomic_folder, dump_json

SHARD_BYTES = 5_000_000_000


def write_checkpoint(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model's folder atomically, replacing a checkpoint that is already there.

    It is a LLaDA's folder if the model is bidirectional, else a Llama's.

    Args:
        folder: The folder to write.
        config: Shape of the model.
        tensors: Parameters by name, on any device, without the output layer if it is tied.
        shard_bytes: Size limit of a file; more tensors are written as shards with an index.

    Raises:
        CheckpointError: `folder` holds other files, which would be lost.
        UserError: The folder cannot be written.
    """
    refuse_other_files(folder)
    with atomic_folder(folder) as temporary:
        write_files(temporary, config, tensors, shard_bytes=shard_bytes)


def write_files(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    tokens: TokenIds = NO_TOKENS,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the files of `write_checkpoint` to a temporary folder. Raises `OSError`."""
    if config.bidirectional:
        tensors = {llada_tensor(name): tensor for name, tensor in tensors.items()}
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
    dump_json(folder / CONFIG, config_json(config, dtype, tokens))


def describe_tokens(folder: Path, tokens: TokenIds) -> None:
    """Put tokens into config.json of a temporary folder, and into generation_config.json.

    Raises `OSError`, and `CheckpointError` if config.json is missing or damaged.
    """
    tree = read_json(folder / CONFIG)
    dump_json(folder / CONFIG, tree | token_fields(tokens, tree.get("model_type")))
    ids = {"bos_token_id": tokens.bos, "eos_token_id": tokens.eos}
    known = {name: number for name, number in ids.items() if number is not None}
    dump_json(folder / GENERATION, known)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file. Raises `OSError` on a system error such as a full disk."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        # safetensors reports the system's error only as text.
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        raise


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


def refuse_other_files(folder: Path, expected: Collection[str] = ()) -> None:
    """Raise `CheckpointError` if replacing `folder` would delete other files than a model's.

    `expected` are the names of more files that may be replaced.
    """
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.name not in (CONFIG, INDEX, *expected) and path.suffix != ".safetensors":
            raise CheckpointError(f"{folder}: holds {path.name}, which would be lost; pick another")
