"""Model FLOPs utilization (MFU): the FLOPs of a training step as a share of the GPUs' peak.

Recomputation, as under activation checkpointing, is not counted.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from infini_model.model.llama import InfiniLlama
from infini_model.model.precision import Precision
from infini_model.training.callbacks.callback import Callback, Step

# Dense bfloat16 peak of a GPU in TFLOP/s, by words in its name; the first match counts. From the
# vendors' data sheets.
PEAK_TERAFLOPS = {
    "GB300": 2500.0,
    "GB200": 2500.0,
    "B300": 2250.0,
    "B200": 2250.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "GH200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10G": 70.0,
    "A10": 125.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "MI300X": 1307.0,
}


def peak_flops(device_name: str) -> float | None:
    """Peak bfloat16 FLOP/s of a GPU; None if unknown, as that of a slice of one (MIG)."""
    if " MIG " in device_name:
        return None
    for words, tera in PEAK_TERAFLOPS.items():
        if re.search(rf"\b{words}\b", device_name):
            return tera * 1e12
    return None


def flops_per_token(model: InfiniLlama, length: int) -> float:
    """FLOPs of forward and backward per token, in rows of `length` tokens.

    - Matrices: 6 per parameter, except the embedding, which is a lookup: a multiplication and an
      addition forward, twice that backward (Kaplan et al., arXiv 2001.08361, section 2.1). A frozen
      one has no gradient of its own: 4.
    - Local attention, of width W = heads · D: a query attends to L/2 of the L keys of its segment
      on average, at 2W each for the scores and for the sum of values; with the backward
      3 · 4W · L/2 = 12 · W · L/2. PaLM (Chowdhery et al., arXiv 2204.02311, appendix B) counts
      twice that, ignoring the mask; in a bidirectional model it is twice that.
    - Memory: a query reads D rows of D per head, 2W · D; a key-value pair is written at 2W_kv · D
      (arXiv 2404.07143, equations 7 and 8). With the backward 6D(W + W_kv), in all segments but
      one: the first reads nothing, and what the last writes is never read. A residual memory has
      features of 2D, so twice that.
    - Block diffusion has two streams, of which one writes and one has an output layer.
    """
    config = model.config
    lookup = None if config.tie_word_embeddings else model.model.embed_tokens.weight
    products = sum(
        _product_flops(parameter)
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1 and parameter is not lookup and not name.endswith("memory_weight")
    )
    segment = min(config.segment_length, length)
    width = config.num_attention_heads * config.head_dim
    kv_width = config.key_value_heads * config.head_dim
    seen = segment if config.bidirectional else segment / 2
    local = 12 * width * seen
    older = 1 - segment / length if config.memory != "none" else 0.0
    streams = 2 if config.bidirectional and config.memory != "none" else 1
    features = config.head_dim * (2 if config.memory == "residual" else 1)
    memory = 6 * features * (streams * width + kv_width) * older
    layers = products - _product_flops(model.lm_head.weight)
    repeated = (streams - 1) * layers
    return products + repeated + config.num_hidden_layers * (streams * local + memory)


def _product_flops(weight: Tensor) -> int:
    """FLOPs per token of a product with `weight`; a frozen one has no gradient."""
    return (6 if weight.requires_grad else 4) * weight.numel()


class Utilization(Callback):
    """The MFU of training `model` in rows of `length` tokens on `devices` devices like `device`.

    The peak is that of 16-bit matmuls: there is no MFU in fp32, on a CPU or on an unknown GPU.
    """

    def __init__(
        self,
        model: InfiniLlama,
        length: int,
        step_tokens: int,
        device: torch.device,
        precision: Precision,
        devices: int,
    ) -> None:
        """`step_tokens` is the number of tokens in a global batch."""
        peak = None
        if device.type == "cuda" and precision.products is not None:
            peak = peak_flops(torch.cuda.get_device_name(device))
        flops = step_tokens * flops_per_token(model, length)
        self._share = None if peak is None else flops / (devices * peak)

    def metrics(self, step: Step, seconds: float) -> dict[str, float]:  # noqa: ARG002
        """`train/mfu`, if it is known."""
        return {} if self._share is None else {"train/mfu": self._share / seconds}
