"""Read the weights of a folder, checking every tensor."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from infini_model.model.hf_checkpoint.config import INDEX, WEIGHTS, read_json
from infini_model.runtime.errors import CheckpointError

_MEMORY_TENSORS = ("self_attn.gate", "self_attn.memory_key_shift")

# In safetensors' notation. Integers and float8 are quantised, and mean nothing without scales.
_DTYPES = ("F64", "F32", "F16", "BF16")

log = logging.getLogger(__name__)


def _weight_files(folder: Path) -> list[Path]:
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
            raise CheckpointError(f"{folder / name}: no such file")
    return [folder / name for name in names]


def _tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one file that the model uses, each checked before it is read."""
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                if name not in shapes:
                    if not _may_be_skipped(name):
                        raise CheckpointError(f"{path}: unexpected tensor {name}")
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
        raise CheckpointError(f"{path}: unreadable safetensors file: {error}") from error


def _may_be_skipped(name: str) -> bool:
    """Whether a tensor may be ignored if the model has none of that name.

    The output layer of a tied model is its embedding; rotary frequencies, stored in old folders,
    are computed; the memory's tensors are not used by a model with memory "none".
    """
    return name == "lm_head.weight" or name.endswith((*_MEMORY_TENSORS, "rotary_emb.inv_freq"))


def read_tensors(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """All tensors that `shapes` names, converted to `dtype` from any floating-point type.

    A folder without any gate (or key shift) is a plain Llama: gates start at 0, and key shifts at
    μ = 0, which is the paper's form. A warning is logged.

    Raises:
        CheckpointError: A file or tensor is missing, damaged, unexpected, quantised or of the wrong
            shape.
    """
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        tensors.update(_tensors(path, shapes, dtype))
    missing = [name for name in shapes if name not in tensors]
    for kind in _MEMORY_TENSORS:
        names = [name for name in shapes if name.endswith(kind)]
        if names and not any(name in tensors for name in names):
            log.warning("%s: no %s found; initialised to 0", folder, kind.partition(".")[2])
            tensors |= {name: torch.zeros(shapes[name], dtype=dtype) for name in names}
            missing = [name for name in missing if name not in names]
    if missing:
        raise CheckpointError(f"{folder}: tensor {missing[0]} is missing")
    return tensors
