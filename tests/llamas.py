"""Llamas to begin from, as `transformers` writes them."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from infini_model.config import validate
from infini_model.training.initial_weights import find_initial_weights, record_initial_weights

SEGMENT = 16
BESIDE = {"segment_length": SEGMENT, "memory": "linear", "read_weight_start": -2.0}


def write_llama(folder, dtype=torch.float32, **changes):
    """A Llama that says something, with a row for each of the bytes and for the end of a text."""
    torch.manual_seed(5)
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 48}
    fields = layers | sizes | {"max_position_embeddings": 128, "initializer_range": 0.2}
    LlamaForCausalLM(LlamaConfig(**fields | changes)).to(dtype).save_pretrained(folder)
    return folder


def from_weights(config, llama, lora=None, **beside):
    """`config`, beginning from a Llama; with `lora` it trains adapters of it."""
    tree = config.model_dump(mode="json", exclude={"model"})
    tree["training"]["lora"] = lora
    return validate(tree | {"model": {"initial_weights": str(llama)} | BESIDE | beside})


def recorded(config, run_dir):
    """The run folder, with the record that the stage `weights` makes."""
    record_initial_weights(run_dir, find_initial_weights(config))
    return run_dir
