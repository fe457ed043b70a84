"""Loading a model, whatever its folder holds: whole weights, or an adapter that names them."""

from __future__ import annotations

from pathlib import Path

import torch

from infini_model.config import AttentionBackend
from infini_model.model.hf_checkpoint import ADAPTER_CONFIG, is_adapter_folder, read_adapter
from infini_model.model.llama import InfiniLlama
from infini_model.training.initial_weights import fetch_folder


def load_model(
    folder: Path,
    *,
    device: str | torch.device = "cpu",
    attention_backend: AttentionBackend = "auto",
) -> InfiniLlama:
    """The model in `folder`, in eval mode.

    That of a LoRA adapter is not merged, so that it computes what it was trained to. The weights
    that the adapter names come from their folder, or from the hub and its local cache.

    Raises:
        CheckpointError: As `InfiniLlama.from_pretrained`.
        ConfigError: The folder that an adapter names is gone.
        DataError, UnreachableError: The hub does not have the weights, or does not answer.
    """
    if not is_adapter_folder(folder):
        model = InfiniLlama.from_pretrained(
            folder, device=device, attention_backend=attention_backend
        )
        return model.eval()
    model = InfiniLlama.from_pretrained(
        _base_of(folder), adapter=folder, device=device, attention_backend=attention_backend
    )
    return model.eval()


def _base_of(folder: Path) -> Path:
    """The folder of the weights that an adapter names."""
    adapter = read_adapter(folder)
    name = adapter.base if adapter.revision is None else f"{adapter.base}@{adapter.revision}"
    return fetch_folder(name, f"{folder / ADAPTER_CONFIG}: base_model_name_or_path")[0]
