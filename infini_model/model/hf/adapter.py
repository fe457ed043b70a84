"""The folder of a LoRA adapter, in the format of `peft`, and the memory's parameters beside it.

`adapter_config.json` and `adapter_model.safetensors` are what `peft` reads. `config.json` is the
shape of the model, as in a folder of whole weights, and `memory.safetensors` holds the memory's
parameters, for which `peft` has no place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from infini_model.config import LoraConfig, ModelConfig
from infini_model.config.explaining import one_line
from infini_model.model.hf.config import ADAPTER_CONFIG, CONFIG, TokenIds, config_json, read_json
from infini_model.model.hf.weights import MEMORY_TENSORS, Save, read_file
from infini_model.model.memory import file_name
from infini_model.runtime.errors import CheckpointError
from infini_model.runtime.storage import dump_json

ADAPTER, MEMORY = "adapter_model.safetensors", "memory.safetensors"
# What peft puts in front of the names of all parameters.
_PREFIX = "base_model.model."
_EMBEDDING, _OUTPUT = f"{_PREFIX}model.embed_tokens.weight", f"{_PREFIX}lm_head.weight"
# peft's settings that are computed here with this value alone.
_FIXED: dict[str, object] = {
    "peft_type": "LORA",
    "bias": "none",
    "rank_pattern": {},
    "alpha_pattern": {},
}


class Adapter(NamedTuple):
    """What adapter_config.json says: the settings, and the weights that are adapted.

    `base` is a folder, or the name of a repository on the hub, of which `revision` is the commit.
    """

    lora: LoraConfig
    base: str
    revision: str | None


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder holds an adapter, not whole weights."""
    return (folder / ADAPTER_CONFIG).is_file()


def write_adapter(
    folder: Path,
    adapter: Adapter,
    config: ModelConfig,
    names: Iterable[str],
    tokens: TokenIds,
    save: Save,
) -> None:
    """Write the files of an adapter to a temporary folder. Raises `OSError`.

    `names` are those of the trained parameters, without the output layer if it is tied; `save`
    writes those of a file.
    """
    stored = {file_name(name): name for name in names}
    memory = {name: ours for name, ours in stored.items() if name.endswith(MEMORY_TENSORS)}
    own = {_PREFIX + name: ours for name, ours in stored.items() if name not in memory}
    if config.tie_word_embeddings and _EMBEDDING in own:
        # peft ties the two, but wants both.
        own[_OUTPUT] = own[_EMBEDDING]
    save(folder / ADAPTER, own)
    if memory:
        save(folder / MEMORY, memory)
    embeddings = {"embed_tokens", "lm_head"} & {*adapter.lora.modules_to_save}
    tree = {
        **_FIXED,
        **adapter.lora.model_dump(mode="json"),
        "base_model_name_or_path": adapter.base,
        "revision": adapter.revision,
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "ensure_weight_tying": config.tie_word_embeddings and bool(embeddings),
    }
    dump_json(folder / ADAPTER_CONFIG, tree)
    dump_json(folder / CONFIG, config_json(config, torch.bfloat16, tokens))


def read_adapter(folder: Path) -> Adapter:
    """What adapter_config.json says.

    Raises `CheckpointError` if the file is missing or damaged, or asks for what is not supported.
    """
    path = folder / ADAPTER_CONFIG
    tree = read_json(path)
    for name, only in _FIXED.items():
        if tree.get(name, only) != only:
            raise CheckpointError(f"{path}: {name} is {tree[name]!r}, only {only!r} is supported")
    base, revision = tree.get("base_model_name_or_path"), tree.get("revision")
    if not isinstance(base, str) or not isinstance(revision, str | None):
        raise CheckpointError(f"{path}: base_model_name_or_path names no weights")
    known = {name: tree[name] for name in LoraConfig.model_fields if tree.get(name) is not None}
    try:
        return Adapter(LoraConfig.model_validate(known), base, revision)
    except ValidationError as error:
        raise CheckpointError(f"{path}: {one_line(error)}") from error


def read_adapter_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The trained parameters that `shapes` names, with the output layer if it is tied, float32.

    Raises `CheckpointError` if one is missing, unexpected, misshapen, or a file is damaged.
    """
    stored = {file_name(name): name for name in shapes}
    memory = [name for name in stored if name.endswith(MEMORY_TENSORS)]
    own = [name for name in stored if name not in memory]
    tensors: dict[str, Tensor] = {}
    for file, prefix, names in ((ADAPTER, _PREFIX, own), (MEMORY, "", memory)):
        if not names:
            continue
        found = read_file(folder / file, {prefix + name: shapes[stored[name]] for name in names})
        for name in names:
            if prefix + name not in found:
                raise CheckpointError(f"{folder / file}: tensor {prefix + name} is missing")
            tensors[stored[name]] = found[prefix + name].float()
    return tensors
