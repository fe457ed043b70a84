"""The model that settings mean: its vocabulary, what its objective decides, and its kernels."""

from __future__ import annotations

from pathlib import Path

from infini_model.config import Config, ModelConfig
from infini_model.data.tokenizers.tokenizer import ByteTokenizer
from infini_model.runtime.errors import ConfigError, DeviceError
from infini_model.runtime.machine import lacking_on_gpu


class UnknownShapeError(LookupError):
    """The settings alone do not say how large the model is; the message says what does."""


def known_shape(config: Config) -> Config:
    """`config` with the model that it trains, as far as the settings alone say.

    A tokenizer that is yet to be trained counts with the size that it is asked for. Raises
    `UnknownShapeError` if weights or a tokenizer would have to be read first, and as
    `with_objective` does.
    """
    if config.model.initial_weights is not None:
        name = config.model.initial_weights
        raise UnknownShapeError(f"not known before the weights {name} have been read")
    tokenizer, size = config.data.tokenizer, config.model.vocab_size
    if not size and config.data.folder is None:
        known = {"bytes": ByteTokenizer.vocab_size, "train": tokenizer.vocab_size}
        size = known.get(tokenizer.spec)
    if size is None:
        name = str(config.data.folder or tokenizer.spec)
        raise UnknownShapeError(f"not known before the tokenizer of {name} has been read")
    return with_objective(config.updated(model={"vocab_size": size}))


def with_vocabulary(
    config: Config, dataset_vocabulary: int, dataset_dir: Path, key: str = "model.vocab_size"
) -> Config:
    """`config` with `model.vocab_size` set, by default to the dataset's vocabulary size.

    Raises `ConfigError` if the model's vocabulary is smaller than the dataset's. `key` is the one
    that the model's comes from.
    """
    size = config.model.vocab_size
    if size is not None and size < dataset_vocabulary:
        raise ConfigError(
            f"{key}: {size} is less than the vocabulary size of the dataset "
            f"{dataset_dir}, {dataset_vocabulary}"
        )
    return config.updated(model={"vocab_size": size or dataset_vocabulary})


def with_objective(config: Config) -> Config:
    """`config` with the model that its objective trains; `model.vocab_size` is known.

    Diffusion needs a bidirectional model and a mask token: by default one more than the vocabulary
    has. Masked diffusion has one segment without a memory, at least as long as the window; block
    diffusion shifts the memory's queries by default. Raises `ConfigError` if the mask token is
    outside the vocabulary.
    """
    if config.training.objective == "causal":
        return config
    size, mask = config.model.vocab_size or 0, config.model.mask_token_id
    if mask is not None and mask >= size:
        raise ConfigError(f"model.mask_token_id: {mask} is outside the vocabulary of {size} tokens")
    decided: dict[str, object] = {"bidirectional": True}
    if mask is None:
        decided |= {"vocab_size": size + 1, "mask_token_id": size}
    if config.training.objective == "block_diffusion":
        shifted = config.model.memory_query_shift
        decided["memory_query_shift"] = shifted is None or shifted
    else:
        length = max(config.packing.context_length, config.model.segment_length)
        decided["segment_length"] = length
    return config.updated(model=decided)


def check_kernels(model: ModelConfig, device: str, *, compiled: bool | None = None) -> None:
    """Raise `DeviceError` if the first step or batch on `device` would find no kernels.

    On a GPU, Triton builds those of the memory; `compiled`, which is `launch.compile`, needs some
    for the layers as well, and null does without what is missing.
    """
    if device != "cuda" or (model.memory == "none" and not compiled):
        return
    if (lack := lacking_on_gpu()) is not None:
        raise DeviceError(
            f"the kernels of a GPU cannot be built: there is no {lack.what}; {lack.remedy}; or "
            "launch.gpus=cpu, which needs none"
        )
