"""Datasets, tokenizers and weights from the Hugging Face hub."""

from infini_model.data.sources.hub.access import (
    fetch_tokenizer,
    pin_repository,
    split_revision,
)
from infini_model.data.sources.hub.listing import list_dataset
from infini_model.data.sources.hub.stream import fetch_dataset
from infini_model.data.sources.hub.weights import fetch_weights

__all__ = [
    "fetch_dataset",
    "fetch_tokenizer",
    "fetch_weights",
    "list_dataset",
    "pin_repository",
    "split_revision",
]
