"""Loading a model, whatever its folder holds: whole weights, or an adapter that names them."""

from __future__ import annotations

from pathlib import Path

import torch

from infini_model.config import AttentionBackend
from infini_model.model.hf import (
    ADAPTER_CONFIG,
    is_adapter_folder,
    read_adapter,
    read_config,
)
from infini_model.model.llama import InfiniLlama
from infini_model.model.precision import Operands, Precision
from infini_model.training.initial_weights import fetch_folder
from infini_model.training.sizing.fitting import check_kernels


def load_model(
    folder: Path,
    *,
    device: str | torch.device = "cpu",
    attention_backend: AttentionBackend = "auto",
    operands: Precision | None = None,
) -> InfiniLlama:
    """The model in `folder`, in eval mode.

    That of a LoRA adapter is not merged, so that it computes what it was trained to. The weights
    that the adapter names come from their folder, or from the hub and its local cache. `operands`
    is the precision of the model if its weights need no other: its device never holds both.

    Raises:
        CheckpointError: As `InfiniLlama.from_pretrained`.
        ConfigError: The folder that an adapter names is gone.
        DataError, UnreachableError: The hub does not have the weights, or does not answer.
        DeviceError: As `check_kernels`, before any weights are read.
    """
    check_kernels(read_config(folder, {}), torch.device(device).type)
    base, adapter = (_base_of(folder), folder) if is_adapter_folder(folder) else (folder, None)
    model = InfiniLlama.from_pretrained(base, adapter=adapter, attention_backend=attention_backend)
    if operands is not None:
        model.precision = operands
        Operands(model, operands).swap()
    return model.to(device).eval()


def _base_of(folder: Path) -> Path:
    """The folder of the weights that an adapter names."""
    adapter = read_adapter(folder)
    name = adapter.base if adapter.revision is None else f"{adapter.base}@{adapter.revision}"
    return fetch_folder(name, f"{folder / ADAPTER_CONFIG}: base_model_name_or_path")[0]
