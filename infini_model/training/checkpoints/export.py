"""The model of a checkpoint as a folder for others: `infini generate`, `transformers` and the like.

It holds config.json and the weights as in the checkpoint, those of a LoRA run perhaps merged,
generation_config.json and, unless the dataset is one of bytes, tokenizer.json and
tokenizer_config.json.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from infini_model.data.tokenizers.bpe import TOKENIZER_FILE, BPETokenizer
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.model.hf import (
    ADAPTER_CONFIG,
    GENERATION,
    describe_tokens,
    is_adapter_folder,
    read_config,
    refuse_other_files,
    write_files,
)
from infini_model.runtime.errors import CheckpointError, ConfigError
from infini_model.runtime.runs import MODEL
from infini_model.runtime.storage import atomic_folder, dump_json
from infini_model.training.checkpoints.checkpoint import tokens_of
from infini_model.training.checkpoints.loading import load_model

TOKENIZER_CONFIG = "tokenizer_config.json"
# What `transformers` itself writes for a model that reads texts of any length.
ANY_LENGTH = 10**30


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
        write_files(folder, model.config, model.whole_tensors())
        _add_tokenizer(folder, tokenizer)


def _add_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Put the tokenizer into a temporary folder of a model, and its ids into config.json."""
    describe_tokens(folder, tokens_of(tokenizer))
    tokenizer.save(folder)
    if isinstance(tokenizer, BPETokenizer):
        dump_json(folder / TOKENIZER_CONFIG, _tokenizer_config(tokenizer, folder))


def check_target(target: Path) -> None:
    """Raise `CheckpointError` if an export to `target` would replace anything but an export."""
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target}: is not a folder; pick another")
    refuse_other_files(target, (ADAPTER_CONFIG, GENERATION, TOKENIZER_FILE, TOKENIZER_CONFIG))


def opens_in_transformers(folder: Path) -> bool:
    """Whether a model folder is a plain Llama: without a memory, and causal."""
    config = read_config(folder, {})
    return config.memory == "none" and not config.bidirectional


def _tokenizer_config(tokenizer: BPETokenizer, folder: Path) -> dict[str, object]:
    """The contents of tokenizer_config.json for the model in `folder`."""
    config = read_config(folder, {})
    return tokenizer.special_tokens() | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.segment_length if config.memory == "none" else ANY_LENGTH,
        "clean_up_tokenization_spaces": False,
    }
