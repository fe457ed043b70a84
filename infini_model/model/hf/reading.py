"""Read the weights of a folder, checking every tensor."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from infini_model.config import ModelConfig
from infini_model.model.hf.config import (
    ADAPTER_CONFIG,
    INDEX,
    WEIGHTS,
    read_config,
    read_json,
    read_tensor_names,
)
from infini_model.model.hf.llada import llada_tensor
from infini_model.model.layers import MEMORY_PARAMETERS
from infini_model.runtime.errors import CheckpointError

MEMORY_TENSORS = tuple(f"self_attn.{name}" for name in MEMORY_PARAMETERS)
_OUTPUT = "lm_head.weight"
# Tensors with a row for each token.
_VOCABULARY = ("model.embed_tokens.weight", _OUTPUT)

# In safetensors' notation. Integers and float8 are quantised, and mean nothing without scales.
_DTYPES = ("F64", "F32", "F16", "BF16")

log = logging.getLogger(__name__)


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


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file. Raises `CheckpointError` where it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: unreadable safetensors file: {error}") from error


class Stored(NamedTuple):
    """A tensor in the files: what the model calls it, and its shape there."""

    name: str
    shape: tuple[int, ...]


def _stored_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Stored]:
    """What the files must hold for a model with `shapes`, by the names in the files.

    The folder may have fewer tokens than the model.
    """
    tokens = read_config(folder, {}).vocab_size

    def stored_shape(name: str) -> tuple[int, ...]:
        rows, *columns = shapes[name]
        if name in _VOCABULARY and tokens is not None:
            rows = min(rows, tokens)
        return (rows, *columns)

    names = read_tensor_names(folder, shapes)
    return {stored: Stored(name, stored_shape(name)) for stored, name in names.items()}


def used_tensors(file: Any, path: Path, expected: Mapping[str, Stored]) -> Iterator[str]:
    """The names of the tensors in an open file that the model uses, checked by the header alone."""
    for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
        if name not in expected:
            if not _may_be_skipped(name):
                raise CheckpointError(f"{path}: unexpected tensor {name}")
            continue
        stored = file.get_slice(name)
        if stored.get_dtype() not in _DTYPES:
            raise CheckpointError(
                f"{path}: tensor {name}: expected dtype {', '.join(_DTYPES)}, "
                f"got {stored.get_dtype()}"
            )
        shape, needed = list(stored.get_shape()), list(expected[name].shape)
        if shape != needed:
            raise CheckpointError(f"{path}: tensor {name}: expected shape {needed}, got {shape}")
        yield name


def _may_be_skipped(name: str) -> bool:
    """Whether a tensor may be ignored if the model has none of that name.

    The output layer of a tied model is its embedding; rotary frequencies, stored in old folders,
    are computed; the memory's tensors are not used by a model with memory "none".
    """
    outputs = (_OUTPUT, llada_tensor(_OUTPUT))
    return name in outputs or name.endswith((*MEMORY_TENSORS, "rotary_emb.inv_freq"))


def _absent_kinds(expected: Mapping[str, Stored], found: Container[str]) -> list[str]:
    """The kinds of memory tensors that the model has and a plain Llama's folder does not."""
    return [
        kind
        for kind in MEMORY_TENSORS
        if (names := [name for name in expected if name.endswith(kind)])
        and not any(name in found for name in names)
    ]


def _check_complete(folder: Path, expected: Mapping[str, Stored], found: Container[str]) -> None:
    absent = tuple(_absent_kinds(expected, found))
    for name in expected:
        if name not in found and not name.endswith(absent):
            raise CheckpointError(f"{folder}: tensor {name} is missing")


def check_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check everything that `read_tensors` does, by the headers alone.

    Raises `CheckpointError` as `read_tensors` does, and for a file that is cut off.
    """
    expected, found = _stored_tensors(folder, shapes), set[str]()
    for path in weight_files(folder):
        with opened(path) as file:
            found.update(used_tensors(file, path, expected))
    _check_complete(folder, expected, found)


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
        with opened(path) as file:
            for stored in used_tensors(file, path, expected):
                name = expected[stored].name
                found[stored] = file.get_tensor(stored).to(dtypes[name])
    _check_complete(folder, expected, found)
    tensors = {
        expected[stored].name: _with_rows(tensor, shapes[expected[stored].name][0])
        for stored, tensor in found.items()
    }
    shift = 0.5 if config.memory == "residual" else 0.0
    starts = {"gate": config.gate_start, "memory_key_shift": shift, "memory_query_shift": shift}
    for kind in _absent_kinds(expected, found):
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
