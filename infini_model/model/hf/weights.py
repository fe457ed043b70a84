"""The weights of a folder in safetensors, whole or sharded: every tensor is checked when read.

A LLaDA's tensors have names of their own. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Collection, Container, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from infini_model.config import ModelConfig
from infini_model.model.hf.config import (
    ADAPTER_CONFIG,
    CONFIG,
    GENERATION,
    INDEX,
    NO_TOKENS,
    WEIGHTS,
    TokenIds,
    config_json,
    read_config,
    read_json,
    token_fields,
)
from infini_model.model.layers import MEMORY_PARAMETERS
from infini_model.runtime.errors import CheckpointError
from infini_model.runtime.storage import atomic_folder, dump_json

SHARD_BYTES = 5_000_000_000
MEMORY_TENSORS = tuple(f"self_attn.{name}" for name in MEMORY_PARAMETERS)
_OUTPUT = "lm_head.weight"
# Tensors with a row for each token.
_VOCABULARY = ("model.embed_tokens.weight", _OUTPUT)
# In safetensors' notation. Integers and float8 are quantised, and mean nothing without scales.
_DTYPES = ("F64", "F32", "F16", "BF16")

_LLADA_MODULES = {
    "model.embed_tokens": "model.transformer.wte",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
}
_LLADA_BLOCK_MODULES = {
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

log = logging.getLogger(__name__)


def _stored_name(name: str, config: ModelConfig) -> str:
    """What the tensor `name` of a model is called in its files; different ones stay different."""
    return _llada_name(name) if config.bidirectional else name


def _llada_name(name: str) -> str:
    module, _, parameter = name.rpartition(".")
    if module in _LLADA_MODULES:
        return f"{_LLADA_MODULES[module]}.{parameter}"
    number, _, inner = module.removeprefix("model.layers.").partition(".")
    inner = _LLADA_BLOCK_MODULES.get(inner, inner)
    return f"model.transformer.blocks.{number}.{inner}.{parameter}"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder. Raises `CheckpointError` if one is missing."""
    names = [WEIGHTS]
    index = folder / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: weight_map is missing")
        names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{index}: {name!r} is not a plain file name")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: no such file{_other_format(folder)}")
    return [folder / name for name in names]


def _other_format(folder: Path) -> str:
    """What a folder without safetensors has instead, for a message; empty if it has some."""
    if (folder / ADAPTER_CONFIG).is_file():
        return "; it is a LoRA adapter: load the weights that it names with adapter=FOLDER"
    others = sorted(path.name for path in folder.glob("*.bin"))
    if any(folder.glob("*.safetensors")) or not others:
        return ""
    return f"; there is {others[0]}, but only weights in safetensors are read"


class Stored(NamedTuple):
    """A tensor in the files: what the model calls it, and its shape there."""

    name: str
    shape: tuple[int, ...]


@contextlib.contextmanager
def opened(path: Path, expected: Mapping[str, Stored]) -> Iterator[tuple[Any, list[str]]]:
    """An open file and the names in it of the tensors that the model uses, checked by the header.

    Raises `CheckpointError` for a damaged file, also while the block reads it, and for a tensor
    that is unexpected, misshapen or quantised.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = []
            for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                if name in expected:
                    _check_header(file.get_slice(name), expected[name], f"{path}: tensor {name}")
                    names.append(name)
                elif not _may_be_skipped(name):
                    raise CheckpointError(f"{path}: unexpected tensor {name}")
            yield file, names
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: unreadable safetensors file: {error}") from error


def _check_header(header: Any, expected: Stored, where: str) -> None:
    dtype, shape = header.get_dtype(), list(header.get_shape())
    if dtype not in _DTYPES:
        raise CheckpointError(f"{where}: expected dtype {', '.join(_DTYPES)}, got {dtype}")
    if shape != list(expected.shape):
        raise CheckpointError(f"{where}: expected shape {list(expected.shape)}, got {shape}")


def _may_be_skipped(name: str) -> bool:
    """Whether a tensor may be ignored if the model has none of that name.

    The output layer of a tied model is its embedding; rotary frequencies, stored in old folders,
    are computed; the memory's tensors are not used by a model with memory "none".
    """
    outputs = (_OUTPUT, _llada_name(_OUTPUT))
    return name in outputs or name.endswith((*MEMORY_TENSORS, "rotary_emb.inv_freq"))


def _stored_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Stored]:
    """What the files must hold for a model with `shapes`, by the names in the files.

    The folder may have fewer tokens than the model.
    """
    config = read_config(folder, {})
    expected = {}
    for name, (rows, *columns) in shapes.items():
        held = min(rows, config.vocab_size or rows) if name in _VOCABULARY else rows
        expected[_stored_name(name, config)] = Stored(name, (held, *columns))
    return expected


def _absent_kinds(
    folder: Path, expected: Mapping[str, Stored], found: Container[str]
) -> tuple[str, ...]:
    """The kinds of memory tensors that the model has and a plain Llama's folder does not.

    Raises `CheckpointError` if any other tensor is missing.
    """
    absent = [kind for kind in MEMORY_TENSORS if any(name.endswith(kind) for name in expected)]
    absent = [kind for kind in absent if not any(n.endswith(kind) and n in found for n in expected)]
    for name in expected:
        if name not in found and not name.endswith(tuple(absent)):
            raise CheckpointError(f"{folder}: tensor {name} is missing")
    return tuple(absent)


def check_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check everything that `read_tensors` does, by the headers alone.

    Raises `CheckpointError` as `read_tensors` does, and for a file that is cut off.
    """
    expected = _stored_tensors(folder, shapes)
    found = set[str]()
    for path in weight_files(folder):
        with opened(path, expected) as (_, names):
            found.update(names)
    _absent_kinds(folder, expected, found)


def read_tensors(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    config: ModelConfig,
) -> dict[str, Tensor]:
    """All tensors that `shapes` names, converted to `dtypes` from any floating-point type.

    A folder without any gate (or shift) is a plain Llama: gates start at the `gate_start` of
    `config`, and shifts at μ = 0, which is the paper's form; a residual memory starts as in a new
    model, for it adds nothing at first. A warning is logged. Where the model has more tokens than
    the folder, each of their rows is the mean of the folder's.

    Raises:
        CheckpointError: A file or tensor is missing, damaged, unexpected, quantised or of the wrong
            shape.
    """
    expected, found = _stored_tensors(folder, shapes), dict[str, Tensor]()
    for path in weight_files(folder):
        with opened(path, expected) as (file, names):
            for stored in names:
                found[stored] = file.get_tensor(stored).to(dtypes[expected[stored].name])
    absent = _absent_kinds(folder, expected, found)
    tensors = {
        expected[stored].name: _with_rows(tensor, shapes[expected[stored].name][0])
        for stored, tensor in found.items()
    }
    shift = 0.5 if config.memory == "residual" else 0.0
    starts = {"gate": config.gate_start, "memory_key_shift": shift, "memory_query_shift": shift}
    for kind in absent:
        parameter = kind.partition(".")[2]
        start = starts.get(parameter, 0.0)
        log.warning("%s: no %s found; initialised to %g", folder, parameter, start)
        names = [name for name in shapes if name.endswith(kind)]
        tensors |= {name: torch.full(shapes[name], start, dtype=dtypes[name]) for name in names}
    return tensors


def _with_rows(tensor: Tensor, rows: int) -> Tensor:
    """`tensor` with `rows` rows: what is missing is the mean of its rows."""
    missing = rows - len(tensor)
    if not missing:
        return tensor
    mean = tensor.mean(dim=0, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return torch.cat((tensor, mean.to(tensor.dtype).expand(missing, -1)))


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
    tensors = {_stored_name(name, config): tensor for name, tensor in tensors.items()}
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
