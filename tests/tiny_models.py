"""A model that is small, but has several layers, grouped heads and short segments."""

from __future__ import annotations

from typing import Any

import torch

from infini_model.config import ModelConfig
from infini_model.model.llama import InfiniLlama
from infini_model.model.memory import MEMORY_PARAMETERS


def tiny_config(**overrides: Any) -> ModelConfig:
    """The shape of a tiny model, with `overrides` of its fields."""
    fields: dict[str, Any] = {
        "vocab_size": 11,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "segment_length": 4,
    }
    return ModelConfig(**fields | overrides)


def draw_memory_parameters(model: InfiniLlama) -> None:
    """Replace the parameters of the memory, which are equal at first, by random ones."""
    for name, parameter in model.named_parameters():
        if name.endswith(MEMORY_PARAMETERS):
            torch.nn.init.normal_(parameter)


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> InfiniLlama:
    """A tiny model with random weights and a random memory."""
    torch.manual_seed(seed)
    model = InfiniLlama(tiny_config(**changes)).to(dtype)
    draw_memory_parameters(model)
    return model
