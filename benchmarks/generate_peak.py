"""Run by `benchmarks.model` to measure the memory of `generate`: a prompt, then a few tokens.

Prints one line of JSON: the peak GPU memory in bytes, or null without a GPU.
"""

from __future__ import annotations

import json
import sys

import torch

from infini_model.config import ModelConfig
from infini_model.model.generation.causal import generate
from infini_model.model.llama import InfiniLlama

NEW_TOKENS = 8


def main(shape: str, prompt_length: str) -> None:
    """Continue a prompt of `prompt_length` tokens; `shape` is the model's config as JSON."""
    cuda = torch.cuda.is_available()
    torch.manual_seed(0)
    model = InfiniLlama(ModelConfig.model_validate_json(shape)).to("cuda" if cuda else "cpu")
    prompt = torch.randint(model.lm_head.out_features, (1, int(prompt_length)))
    generate(model, prompt, max_new_tokens=NEW_TOKENS)
    print(json.dumps({"cuda_bytes": torch.cuda.max_memory_allocated() if cuda else None}))


if __name__ == "__main__":
    main(*sys.argv[1:])
