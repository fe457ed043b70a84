"""What a decoder layer keeps for its backward pass, and what that pass works on.

Follows the code of `infini_model.model`: what each operator saves, and which of it is the same
tensor. The products of one input share it, in 16 bits under autocast. PyTorch's RMSNorm is one
kernel on CUDA; on a CPU it saves the normalised input as well, for the gradient of its weight.
Compiled layers keep less, which is not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from infini_model.config import LoraConfig, ModelConfig
from infini_model.training.sizing.parameters import FLOAT, is_saved, keeps_input, matrices


@dataclass(frozen=True)
class Workload:
    """One micro-batch on its way through the layers.

    Attributes:
        windows: Rows of the micro-batch.
        tokens: Tokens of a row.
        streams: Passes of each row: 2 in block diffusion, which reads the memory of a clean one.
        product_bytes: Bytes of a number in the result of a product: 2 under autocast, else 4.
        on_cpu: Whether the device is the CPU.
        kernel: What computes the attention inside segments: `tiled`, `math`, or another that saves
            its rotated inputs and its output.
    """

    windows: int
    tokens: int
    streams: int
    product_bytes: int
    on_cpu: bool
    kernel: str

    @property
    def rows(self) -> int:
        """Tokens that pass through a layer."""
        return self.windows * self.tokens * self.streams


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of one layer: of its input, and of what each half keeps and works on besides.

    `final_norm` is what the norm after the last layer keeps.
    """

    input: int
    attention: int
    mlp: int
    attention_working: int
    mlp_working: int
    final_norm: int

    @property
    def kept(self) -> int:
        """All that the layer keeps, its input included."""
        return self.input + self.attention + self.mlp

    @property
    def backward(self) -> int:
        """The most that the layer holds in its backward pass; the feed-forward's comes first."""
        with_mlp = self.kept + self.mlp_working
        return max(with_mlp, self.input + self.attention + self.attention_working)


def layer_activations(
    model: ModelConfig, lora: LoraConfig | None, work: Workload
) -> LayerActivations:
    """The activations of one layer."""
    rows, hidden, inner = work.rows, model.hidden_size, model.intermediate_size
    residual, width = rows * hidden * FLOAT, model.num_attention_heads * model.head_dim
    inner_bytes = rows * inner * work.product_bytes
    first, second, last = (
        residual * (work.on_cpu and is_saved(name, lora))
        for name in ("input_layernorm", "post_attention_layernorm", "norm")
    )
    kept = {each.name for each in matrices(model) if keeps_input(each, lora)}
    product_input = rows * hidden * work.product_bytes
    attention = first + product_input * bool(kept & {"q_proj", "k_proj", "v_proj"})
    attention += _attention(model, work) + _memory(model, work)
    if "o_proj" in kept:
        attention += rows * width * work.product_bytes
    # The input of the norm; the results of gate_proj, of its activation, and of up_proj.
    mlp = residual + second + 3 * inner_bytes
    mlp += product_input * bool(kept & {"gate_proj", "up_proj"})
    if "down_proj" in kept:
        mlp += inner_bytes
    return LayerActivations(
        input=residual,
        attention=attention,
        mlp=mlp,
        # Gradients of queries, of both kinds of attention, and of the residual.
        attention_working=residual + 4 * rows * width * FLOAT,
        # The gradients of the three results, while that of down_proj's input is still there.
        mlp_working=residual + (2 if "down_proj" in kept else 3) * inner_bytes,
        final_norm=residual + last,
    )


def _attention(model: ModelConfig, work: Workload) -> int:
    """Queries, keys and values as the attention inside segments and the memory save them."""
    width = model.num_attention_heads * model.head_dim
    kv_width = model.key_value_heads * model.head_dim
    has_memory, extra = model.memory != "none", 0.0
    # The values, and the result of the attention, which the memory's reads or the kernel save.
    queries, keys = 0.0, 1.0
    if work.kernel == "tiled":
        queries, keys = (2.0, 2.0) if has_memory else (1.0, 2.0)
    else:
        queries, keys = 2.0, 2.0  # rotated
        extra += model.num_attention_heads * FLOAT  # log-sum-exp
        if has_memory:
            queries, keys = 3.0, 3.0
    if has_memory and model.memory_key_shift:
        keys += 1.0 / work.streams
    if has_memory and work.streams > 1:
        queries += 1.0  # of both streams beside the memory, and so the attention
    if has_memory and model.memory_query_shift:
        queries += 1.0
    if work.kernel == "math":
        segment = min(model.segment_length, work.tokens)
        extra += model.num_attention_heads * segment * work.product_bytes
    numbers = queries * width + keys * kv_width
    return int(work.rows * (numbers * work.product_bytes + extra))


def _memory(model: ModelConfig, work: Workload) -> int:
    """The memory before each segment; under the delta rule also what leads from one to the next."""
    if model.memory == "none":
        return 0
    segments = math.ceil(work.tokens / model.segment_length)
    heads, width = model.key_value_heads, model.head_dim
    if model.memory == "residual":
        gates = work.windows * work.tokens * heads * FLOAT
        return segments * work.windows * heads * 2 * width * width * FLOAT + 6 * gates
    states = work.windows * heads * (width + 1) * width * FLOAT
    if model.memory == "linear":
        return segments * states
    block = math.isqrt(segments) + 1
    padded = block * math.ceil((segments + 1) / block)
    features = work.windows * work.tokens * heads * width * FLOAT
    return (segments + 5 * padded) * states + 6 * features
