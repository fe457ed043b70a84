"""The model of a checkpoint as a folder for others: `infini generate`, `transformers` and the like.

It holds config.json and the weights as in the checkpoint, those of a LoRA run perhaps merged,
generation_config.json, tokenizer.json and tokenizer_config.json, and on request the code by which
`transformers` opens it without this package.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from infini_model.config import Config, ModelConfig
from infini_model.data.manifest import TokenizerRecord
from infini_model.data.tokenizers.bpe import BPETokenizer
from infini_model.data.tokenizers.gpu import byte_of_character
from infini_model.data.tokenizers.stated import END_OF_TEXT, TOKENIZER_CONFIG, TOKENIZER_FILES
from infini_model.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from infini_model.model.hf.adapter import is_adapter_folder, read_adapter
from infini_model.model.hf.config import (
    ADAPTER_CONFIG,
    CONFIG,
    TokenIds,
    read_config,
    read_json,
)
from infini_model.model.hf.weights import is_model_file, refuse_other_files, write_files
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
# The file of `infini_model.hf` that is written beside a model, and its class of models.
CODE, PLAIN_MODEL = "modeling_infini_llama.py", "PlainInfiniLlamaForCausalLM"
_FILES = (ADAPTER_CONFIG, CODE, *TOKENIZER_FILES)


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


def export_model(
    checkpoint: Path,
    target: Path,
    tokenizer: Tokenizer,
    *,
    merge: bool = False,
    with_code: bool = False,
) -> None:
    """Write the model of `checkpoint` to `target` atomically, with its dataset's tokenizer.

    What is at `target` is replaced.

    Args:
        merge: Merge the adapters of a LoRA run into its initial weights.
        with_code: Add what `transformers` needs to open a model with a memory or a window where
            this package is not installed: `infini_model.hf.modeling_infini_llama`.

    Raises:
        UserError: The disk is full, or the folder is not writable.
        CheckpointError: The checkpoint has been removed meanwhile.
        ConfigError: There is nothing to merge, adapters would have to be merged, or the code does
            not compute such a model.
    """
    has_adapters = is_adapter_folder(checkpoint / MODEL)
    if merge and not has_adapters:
        raise ConfigError(f"--merge: {checkpoint} has no adapters; its model is whole as it is")
    if with_code and has_adapters and not merge:
        raise ConfigError("--format remote-code: the run has adapters; add --merge")
    model = load_model(checkpoint / MODEL) if merge else None
    with atomic_folder(target) as folder:
        try:
            if model is not None:
                write_files(folder, model.config, model.whole_tensors(), tokens_of(tokenizer))
            else:
                for file in sorted((checkpoint / MODEL).iterdir()):
                    shutil.copyfile(file, folder / file.name)
        except FileNotFoundError as error:
            raise CheckpointError(f"{checkpoint}: was removed meanwhile; run again") from error
        (tokenizer if isinstance(tokenizer, BPETokenizer) else bytes_as_bpe()).save(folder)
        config, path = read_config(folder, {}), folder / TOKENIZER_CONFIG
        length = ANY_LENGTH if config.has_past else config.segment_length
        dump_json(path, read_json(path) | {"model_max_length": length})
        if with_code:
            _add_code(folder, config)


def _add_code(folder: Path, config: ModelConfig) -> None:
    """Put the code of a model into its temporary folder, if `transformers` itself has none."""
    if config.bidirectional or config.memory not in ("residual", "none"):
        raise ConfigError("--format remote-code: needs a causal model with memory residual or none")
    if config.has_past:
        shutil.copyfile(Path(__file__).parents[1] / "hf" / CODE, folder / CODE)
        auto = {"AutoConfig": "InfiniLlamaConfig", "AutoModelForCausalLM": PLAIN_MODEL}
        auto_map = {name: f"{Path(CODE).stem}.{value}" for name, value in auto.items()}
        added = {"auto_map": auto_map, "architectures": [PLAIN_MODEL]}
        dump_json(folder / CONFIG, read_json(folder / CONFIG) | added)


def bytes_as_bpe() -> BPETokenizer:
    """Return the tokenizer of bytes in the form that `transformers` reads.

    It gives the same ids, but for a text that spells the end-of-text token.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Definition

    end = ByteTokenizer.eos_token_id
    letters = {letter: byte for letter, byte in byte_of_character().items() if byte < end}
    definition = Definition(models.BPE(letters, []))
    definition.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    definition.decoder = decoders.ByteLevel()
    definition.add_special_tokens([AddedToken(END_OF_TEXT[0], normalized=False, special=True)])
    return BPETokenizer(ByteTokenizer.spec, definition.to_str(), eos_token=END_OF_TEXT[0])


def check_target(target: Path) -> None:
    """Raise `CheckpointError` if an export to `target` would replace anything but an export."""
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target}: is not a folder; pick another")
    refuse_other_files(target, _FILES)


def is_exported(name: str) -> bool:
    """Return True for the names of the files that an export may replace."""
    return name in _FILES or is_model_file(name)
