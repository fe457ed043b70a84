"""The weights of a folder in safetensors, whole or sharded: every tensor is checked when read.

A LLaDA's tensors have names of their own. Nothing is unpickled.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from infini_model.config import ModelConfig
from infini_model.model.hf.config import (
    CONFIG,
    INDEX,
    NO_TOKENS,
    WEIGHTS,
    TokenIds,
    config_json,
    model_type,
    read_config,
    read_json,
)
from infini_model.model.memory import MEMORY_PARAMETERS, RULES, file_name
from infini_model.model.memory.rule import SHIFTS
from infini_model.runtime.errors import CheckpointError
from infini_model.runtime.storage import dump_json

# Writes a file: of its tensors, by their names there, the names that they have in the model.
Save = Callable[[Path, Mapping[str, str]], None]
# The largest file of weights: more tensors are written as shards with an index.
SHARD_BYTES = 5 * 10**9
MEMORY_TENSORS = tuple(f"self_attn.{name}" for name in MEMORY_PARAMETERS)
_OUTPUT = "lm_head.weight"
# Tensors with a row for each token.
_VOCABULARY = ("model.embed_tokens.weight", _OUTPUT)
# In safetensors' notation. Integers and float8 are quantised, and mean nothing without scales.
_DTYPES = ("F64", "F32", "F16", "BF16")

# LLaDA's name of each part of a Llama, and of the layers that hold them.
_LLADA_NAMES = {
    "lm_head": "model.transformer.ff_out",
    "model.embed_tokens": "model.transformer.wte",
    "model.norm": "model.transformer.ln_f",
    "model.layers": "model.transformer.blocks",
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
# What a model may have no use for: if it is tied, the output layer; with memory "none" what is of
# the memory; and the rotary frequencies of old folders, which are computed.
_OUTPUTS = (_OUTPUT, f"{_LLADA_NAMES['lm_head']}.weight")
_UNUSED = (*MEMORY_TENSORS, "rotary_emb.inv_freq")

log = logging.getLogger(__name__)


def _stored_name(name: str, kind: object) -> str:
    """What the tensor `name` of a model is called in its files; different ones stay different."""
    name = file_name(name)
    for ours, theirs in _LLADA_NAMES.items() if kind == "llada" else ():
        name = name.replace(ours, theirs)
    return name


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
            raise CheckpointError(
                f"{folder / name}: no such file; only weights in safetensors are read, and a LoRA "
                "adapter as adapter=FOLDER beside them"
            )
    return [folder / name for name in names]


def read_file(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors of a file that `shapes` names, mapped: they are not read before they are used.

    Raises `CheckpointError` for a damaged file, and for a tensor that is unexpected, misshapen or
    quantised.
    """
    tensors, unread = {}, set[str]()
    with opened(path) as file:
        for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
            if name not in shapes:
                unread |= {kind for kind in MEMORY_PARAMETERS if name.endswith(f".{kind}")}
                if name in _OUTPUTS or name.endswith(_UNUSED):
                    continue
                raise CheckpointError(f"{path}: unexpected tensor {name}")
            where, header = f"{path}: tensor {name}", file.get_slice(name)
            if (dtype := header.get_dtype()) not in _DTYPES:
                takes = ", ".join(_DTYPES)
                raise CheckpointError(f"{where}: expected dtype {takes}, got {dtype}")
            if (shape := header.get_shape()) != (expected := list(shapes[name])):
                raise CheckpointError(f"{where}: expected shape {expected}, got {shape}")
            tensors[name] = file.get_tensor(name)
    if unread:
        names = ", ".join(sorted(unread))
        log.warning("%s: not read, as the model has no use for it: %s", path, names)
    return tensors


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file. Raises `CheckpointError` if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: unreadable safetensors file: {error}") from error


def checked_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors of a folder for a model with `shapes`, checked by their headers, and mapped.

    The folder may have fewer tokens than the model, and lack a kind of memory parameter altogether.

    Raises:
        CheckpointError: A file or tensor is missing, damaged, unexpected, quantised or of the wrong
            shape, or a file is cut off.
    """
    config, files, found = read_config(folder, {}), weight_files(folder), dict[str, Tensor]()
    kind = read_json(folder / CONFIG).get("model_type")
    names = {_stored_name(name, kind): name for name in shapes}
    expected = {stored: shapes[name] for stored, name in names.items()}
    for stored, name in names.items():
        if name in _VOCABULARY and config.vocab_size is not None:
            rows, columns = shapes[name]
            expected[stored] = min(rows, config.vocab_size), columns
    for path in files:
        found |= {names[stored]: each for stored, each in read_file(path, expected).items()}
    names_found = [*map(file_name, found)]
    absent = [kind for kind in MEMORY_TENSORS if not any(n.endswith(kind) for n in names_found)]
    for stored, name in names.items():
        if name not in found and not stored.endswith(tuple(absent)):
            raise CheckpointError(f"{folder}: tensor {stored} is missing")
    return found


def read_tensors(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    config: ModelConfig,
) -> dict[str, Tensor]:
    """All tensors that `shapes` names, converted to `dtypes` from any floating-point type.

    A folder without any read weight (or shift) is a plain Llama: read weights start at
    `config.read_weight_start`, and shifts at μ = 0, which is the paper's form; a residual memory
    starts as in a new model, with shifts at 0.5, for it adds nothing at first. A warning is logged.
    Where the model has more tokens than the folder, each of their rows is the mean of the folder's.

    Raises `CheckpointError` as `checked_tensors`.
    """
    tensors = {
        name: _with_rows(tensor.to(dtypes[name]), shapes[name][0])
        for name, tensor in checked_tensors(folder, shapes).items()
    }
    shift = RULES[config.memory].pretrained_shift if config.memory in RULES else 0.0
    starts = dict.fromkeys(SHIFTS, shift) | {"gate": config.read_weight_start}
    begun = []
    for parameter in MEMORY_PARAMETERS:
        start = starts.get(parameter, 0.0)
        names = [n for n in shapes if n.endswith(f".{parameter}") and n not in tensors]
        tensors |= {name: torch.full(shapes[name], start, dtype=dtypes[name]) for name in names}
        begun += [f"{parameter} {start:g}"] if names else []
    if begun:
        log.warning("%s: has no weights of a memory; initialised: %s", folder, ", ".join(begun))
    return tensors


def with_own_output(folder: Path, config: ModelConfig) -> ModelConfig:
    """`config`, untied if the folder holds an output layer that is not its embedding.

    A line says so. Raises `CheckpointError` for a file that is missing or damaged.
    """
    if not config.tie_word_embeddings:
        return config
    kind = read_json(folder / CONFIG).get("model_type")
    names = [_stored_name(name, kind) for name in _VOCABULARY]
    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        with opened(path) as file:
            found |= {name: file.get_tensor(name) for name in {*names} & {*file.keys()}}
    embedding, output = map(found.get, names)
    if embedding is None or output is None or torch.equal(embedding, output):
        return config
    log.warning(
        "%s: tie_word_embeddings is true, but %s is not the embedding: it is kept, and the model "
        "is not tied",
        folder / CONFIG,
        names[1],
    )
    return config.updated(tie_word_embeddings=False)


def _with_rows(tensor: Tensor, rows: int) -> Tensor:
    """`tensor` with `rows` rows: what is missing is the mean of its rows."""
    missing = rows - len(tensor)
    if not missing:
        return tensor
    mean = tensor.mean(dim=0, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return torch.cat((tensor, mean.to(tensor.dtype).expand(missing, -1)))


def write_files(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    tokens: TokenIds = NO_TOKENS,
    save: Save | None = None,
) -> None:
    """Write the files of a model to a temporary folder.

    `tensors` are the parameters by name, on any device, without the output layer if it is tied.
    `save` writes those of a file, which by default are here, not on `meta`. Raises `OSError` if the
    disk is full, or the folder cannot be written.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    ours = {_stored_name(name, model_type(config)): name for name in tensors}
    stored = {theirs: tensors[name] for theirs, name in ours.items()}
    shards = split_torch_state_dict_into_shards(stored, max_shard_size=SHARD_BYTES)
    for file, names in shards.filename_to_tensors.items():
        if save is not None:
            save(folder / file, {name: ours[name] for name in names})
        else:
            save_tensors({name: stored[name].contiguous() for name in names}, folder / file)
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        dump_json(folder / INDEX, index)
    dtype = next(iter(stored.values())).dtype
    dump_json(folder / CONFIG, config_json(config, dtype, tokens))


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file. Raises `OSError` on a system error such as a full disk."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        # safetensors reports the system's error only as text.
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        raise


def is_model_file(name: str) -> bool:
    """Return True for the names of the files in which a model is saved."""
    return name in (CONFIG, INDEX) or name.endswith(".safetensors")


def refuse_other_files(folder: Path, expected: Collection[str] = ()) -> None:
    """Raise `CheckpointError` if replacing `folder` would delete other files than a model's.

    `expected` are the names of more files that may be replaced.
    """
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.name not in expected and not is_model_file(path.name):
            raise CheckpointError(f"{folder}: holds {path.name}, which would be lost; pick another")
