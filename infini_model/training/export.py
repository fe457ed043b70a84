"""The model of a checkpoint as a folder for others: `infini generate`, `transformers` and the like.

It holds config.json and the weights as in the checkpoint, those of a LoRA run perhaps merged,
generation_config.json and, unless the dataset is one of bytes, tokenizer.json and
tokenizer_config.json.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from infini_model.config import Config
from infini_model.data.manifest import TokenizerRecord
from infini_model.data.tokenizers.bpe import BPETokenizer
from infini_model.data.tokenizers.stated import TOKENIZER_CONFIG, TOKENIZER_FILES
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.model.hf.adapter import is_adapter_folder, read_adapter
from infini_model.model.hf.config import (
    ADAPTER_CONFIG,
    GENERATION,
    TokenIds,
    read_config,
    read_json,
)
from infini_model.model.hf.weights import refuse_other_files, write_files
from infini_model.model.llama import InfiniLlama
from infini_model.model.precision import cast_weights, resolve_precision
from infini_model.runtime.errors import CheckpointError, ConfigError
from infini_model.runtime.runs import MODEL
from infini_model.runtime.storage import atomic_folder, dump_json
from infini_model.training.initial_weights import fetch_folder
from infini_model.training.launch.devices import first_device
from infini_model.training.model_shape import check_kernels

# What `transformers` itself writes for a model that reads texts of any length.
ANY_LENGTH = 10**30


def load_model(folder: Path, config: Config | None = None) -> InfiniLlama:
    """The model in `folder`, in eval mode: whole weights, or an adapter that names them.

    An adapter is not merged, so that the model computes what it was trained to. The weights that it
    names come from their folder, or from the hub and its local cache. With `config` it is on the
    first device of `launch.gpus`, and linear layers hold their weights in the precision of the
    training, that of the model's products.

    Raises:
        CheckpointError: As `InfiniLlama.from_pretrained`.
        ConfigError: The folder that an adapter names is gone.
        DataError, UnreachableError: The hub does not have the weights, or does not answer.
        DeviceError: As `first_device`, and as `check_kernels`, before any weights are read.
    """
    device = torch.device("cpu" if config is None else first_device(config.launch.gpus))
    check_kernels(read_config(folder, {}), device.type)
    base, adapter = folder, None
    if is_adapter_folder(folder):
        said, key = read_adapter(folder), f"{folder / ADAPTER_CONFIG}: base_model_name_or_path"
        name = said.base if said.revision is None else f"{said.base}@{said.revision}"
        (base, _), adapter = fetch_folder(name, key), folder
    backend = "auto" if config is None else config.launch.attention_backend
    model = InfiniLlama.from_pretrained(base, adapter=adapter, attention_backend=backend)
    if config is not None:
        model.precision = resolve_precision(config.training.precision, device)
        cast_weights(model, model.precision)
    return model.to(device).eval()


def tokens_of(tokenizer: Tokenizer | TokenizerRecord) -> TokenIds:
    """What the folder of a model says about the tokenizer of its dataset."""
    name = tokenizer.spec if tokenizer.spec == "bytes" else None
    return TokenIds(tokenizer.bos_token_id, tokenizer.eos_token_id, name)


def export_model(checkpoint: Path, target: Path, tokenizer: Tokenizer) -> None:
    """Write the model of `checkpoint` to `target` atomically, with its dataset's tokenizer.

    What is at `target` is replaced.

    Raises `UserError` if the disk is full or the folder is not writable, `CheckpointError` if the
    checkpoint has been removed meanwhile.
    """
    with atomic_folder(target) as folder:
        try:
            for file in sorted((checkpoint / MODEL).iterdir()):
                shutil.copyfile(file, folder / file.name)
        except FileNotFoundError as error:
            raise CheckpointError(f"{checkpoint}: was removed meanwhile; run again") from error
        _add_tokenizer(folder, tokenizer)


def export_merged(checkpoint: Path, target: Path, tokenizer: Tokenizer) -> None:
    """As `export_model`, with the adapters of a LoRA run merged into its initial weights.

    Raises `ConfigError` that names `--merge` if the run has no adapters, and as `load_model`.
    """
    if not is_adapter_folder(checkpoint / MODEL):
        raise ConfigError(f"--merge: {checkpoint} has no adapters; its model is whole as it is")
    model = load_model(checkpoint / MODEL)
    with atomic_folder(target) as folder:
        write_files(folder, model.config, model.whole_tensors(), tokens_of(tokenizer))
        _add_tokenizer(folder, tokenizer)


def _add_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Put the tokenizer into a temporary folder of a model, whose config.json has its ids."""
    tokenizer.save(folder)
    if not isinstance(tokenizer, BPETokenizer):
        dump_json(folder / GENERATION, {"eos_token_id": tokenizer.eos_token_id})
        return
    config, path = read_config(folder, {}), folder / TOKENIZER_CONFIG
    length = ANY_LENGTH if config.has_past else config.segment_length
    dump_json(path, read_json(path) | {"model_max_length": length})


def check_target(target: Path) -> None:
    """Raise `CheckpointError` if an export to `target` would replace anything but an export."""
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target}: is not a folder; pick another")
    refuse_other_files(target, (ADAPTER_CONFIG, *TOKENIZER_FILES))
