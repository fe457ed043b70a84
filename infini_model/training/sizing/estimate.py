"""The memory that one process of a training needs, from its settings alone.

A step holds most at one of a few moments: when the loss ends the forward pass, when the backward
pass begins, in its first layer or its last, or at its end. Each is added up from what the code
keeps by then, and the estimate is the largest. Nothing is allocated, and torch is not imported.
`benchmarks.memory_estimate` compares it with measured peaks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

from infini_model.config import Config
from infini_model.training.sizing.activations import Workload, layer_activations
from infini_model.training.sizing.parameters import (
    FLOAT,
    HALF,
    Parameters,
    layer_parameters,
    output_is_trained,
    root_parameters,
)

Device = Literal["cpu", "cuda"]

GIB = 1 << 30
# As in `infini_model.model`, which imports torch; tests compare them.
LOGITS_AT_ONCE = 1 << 26
PRODUCTS_AT_ONCE = 1 << 24
UNTILED_LENGTH = 128


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one process holds at the moment of a step at which it holds most.

    Attributes:
        weights: The parameters; under FSDP this process's shards.
        weight_copies: Weights in the dtype of products, and those that FSDP has gathered.
        gradients: Of the trained parameters, float32.
        moments: AdamW's two, float32.
        activations: What is kept for the backward pass, and what a layer's backward pass works on.
        loss: Logits, and the gradients of the output layer and of its input.
    """

    weights: int = 0
    weight_copies: int = 0
    gradients: int = 0
    moments: int = 0
    activations: int = 0
    loss: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(getattr(self, part.name) for part in fields(self))

    def __str__(self) -> str:
        """The total and the parts in GiB, such as "3.1 GiB (weights 0.4, …)"."""
        shown = {
            part.name.replace("_", " "): gib(getattr(self, part.name)) for part in fields(self)
        }
        parts = [f"{name} {size}" for name, size in shown.items() if float(size.replace(",", ""))]
        return f"{gib(self.total)} GiB ({', '.join(parts)})" if parts else "under 0.05 GiB"


def gib(size: int) -> str:
    """A number of bytes in GiB, with two digits or more."""
    number = size / GIB
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}" if number >= 1 else f"{number:.2f}"


def estimate_memory(config: Config, processes: int, device: Device) -> MemoryEstimate:
    """What one of `processes` processes needs in a step of the training that `config` describes.

    `config.model` is that of the model itself, its vocabulary included (see
    `infini_model.training.sizing.shape`). What Python, libraries, the CUDA context and
    fragmentation take comes on top.
    """
    step = _Step(config, processes, device)
    moments = (
        step.loss_forward(),
        step.loss_backward(),
        step.first_layer_backward(),
        step.last_layer_backward(),
        step.end(),
    )
    return max(moments, key=lambda moment: moment.total)


def checkpoint_copy(config: Config, device: Device) -> int:
    """Bytes of the copy that rank 0 keeps of what a checkpoint holds, in main memory.

    It holds what is trained and its moments. Of CUDA tensors the copy is page-locked, and PyTorch
    rounds each of its tensors up to a power of two.
    """
    model, lora = config.model, config.training.lora
    layers = [*layer_parameters(model, lora)] * model.num_hidden_layers
    sizes = [FLOAT * each.size for each in (*root_parameters(model, lora), *layers) if each.trained]
    if device == "cuda":
        sizes = [1 << (size - 1).bit_length() for size in sizes]
    return 3 * sum(sizes)


def workload(config: Config, device: Device) -> Workload:
    """A micro-batch of the training that `config` describes, as its layers see it."""
    training, model = config.training, config.model
    auto = HALF if device == "cuda" else FLOAT
    product_bytes = {"auto": auto, "fp32": FLOAT, "bf16": HALF, "fp16": HALF}[training.precision]
    kernel, tokens = config.launch.attention_backend, config.packing.context_length
    if device == "cpu" and product_bytes == FLOAT and kernel in ("auto", "tiled"):
        is_long = kernel == "tiled" or min(model.segment_length, tokens) > UNTILED_LENGTH
        kernel = "tiled" if is_long and training.objective == "causal" else "auto"
    return Workload(
        windows=training.batch_size,
        tokens=tokens,
        streams=2 if training.objective == "block_diffusion" else 1,
        product_bytes=product_bytes,
        on_cpu=device == "cpu",
        kernel=kernel,
    )


class _Step:
    """A training step, and what it holds at the moments at which it may hold most."""

    def __init__(self, config: Config, processes: int, device: Device) -> None:
        model, lora = config.model, config.training.lora
        vocabulary = model.vocab_size or 0
        self._config, self._layers = config, model.num_hidden_layers
        self._sharded = config.launch.strategy == "fsdp" and processes > 1
        self._recomputes = config.launch.gradient_checkpointing
        self._work = workload(config, device)
        self._activations = layer_activations(model, lora, self._work)
        self._layer, self._root = [*layer_parameters(model, lora)], [*root_parameters(model, lora)]
        shards = processes if self._sharded else 1
        everything = [*self._root, *self._layer * self._layers]
        self._weights = _nbytes(everything) // shards
        self._gradients = _gradient_bytes(everything) // shards
        self._output = vocabulary * model.hidden_size
        self._output_gradient = FLOAT * self._output * output_is_trained(model, lora)
        # Gradients of earlier micro-batches, or DDP's buckets, which live as long as the training.
        accumulates = config.training.gradient_accumulation_steps > 1
        keeps = accumulates or (processes > 1 and not self._sharded)
        self._kept_gradients = self._gradients if keeps else 0

    def loss_forward(self) -> MemoryEstimate:
        """While the last chunk of logits exists."""
        rows = self._config.training.batch_size * self._work.tokens
        vocabulary = self._config.model.vocab_size or 1
        at_once = max(LOGITS_AT_ONCE, self._output)
        chunks = math.ceil(rows / max(1, at_once // vocabulary))
        working = FLOAT * math.ceil(rows / chunks) * vocabulary
        if self._work.product_bytes == HALF:
            # The products beside the logits, and a part of the gradient of the weight, which a CPU
            # copies to float32 to add it.
            part = min(PRODUCTS_AT_ONCE, self._output) * bool(self._output_gradient)
            working += working // 2 + part * (HALF + FLOAT * self._work.on_cpu)
        # Of diffusion the rows of masked tokens are copied; at worst these are all.
        copies = 2 if self._config.training.objective == "causal" else 3
        hidden = copies * rows * self._config.model.hidden_size * FLOAT
        table = self._cast(self._root[-1])
        return self._at(
            weight_copies=self._layers * self._layer_casts(in_forward=True),
            gradients=self._kept_gradients,
            activations=self._kept(self._layers),
            loss=working + hidden + table + self._output_gradient,
        )

    def loss_backward(self) -> MemoryEstimate:
        """While the gradients of the loss are multiplied by its own."""
        rows = self._config.training.batch_size * self._work.tokens
        hidden = rows * self._config.model.hidden_size * FLOAT
        return self._at(
            weight_copies=self._layers * self._layer_casts(),
            gradients=self._kept_gradients,
            activations=self._kept(self._layers),
            loss=2 * (hidden + self._output_gradient),
        )

    def first_layer_backward(self) -> MemoryEstimate:
        """In the backward pass of the last layer of the model."""
        below = self._kept(self._layers - 1)
        casts = 1 if self._recomputes else self._layers
        unsharded = self._sharded or not self._kept_gradients
        return self._at(
            weight_copies=casts * self._layer_casts() + self._gathered(),
            gradients=self._kept_gradients
            + self._output_gradient * unsharded
            + self._layer_gradients(),
            activations=below + self._activations.backward,
        )

    def last_layer_backward(self) -> MemoryEstimate:
        """In the backward pass of the first layer of the model."""
        return self._at(
            weight_copies=self._layer_casts() + self._gathered(),
            gradients=self._gradients
            + (self._output_gradient + self._layer_gradients()) * self._sharded,
            activations=self._activations.backward,
        )

    def end(self) -> MemoryEstimate:
        """When the gradient of the embedding is there.

        Under FSDP the root's weights are freed then, and its gradients copied to be reduced.
        """
        root = _gradient_bytes(self._root)
        more = 2 * root if self._sharded else root // 2 * bool(self._kept_gradients)
        return self._at(
            gradients=self._gradients + more,
            activations=self._activations.input,
            root_gathered=False,
        )

    def _at(
        self,
        *,
        gradients: int,
        activations: int,
        weight_copies: int = 0,
        loss: int = 0,
        root_gathered: bool = True,
    ) -> MemoryEstimate:
        """A moment with these parts, and with those that are there all the time."""
        root = _nbytes(self._root) if self._sharded and root_gathered else 0
        return MemoryEstimate(
            weights=self._weights,
            weight_copies=weight_copies + root,
            gradients=gradients,
            moments=2 * self._gradients,
            activations=activations,
            loss=loss,
        )

    def _kept(self, layers: int) -> int:
        """What this many layers and the final norm keep from the forward pass."""
        each = self._activations.input if self._recomputes else self._activations.kept
        return layers * each + self._activations.final_norm

    def _layer_casts(self, *, in_forward: bool = False) -> int:
        """A layer's weights in the dtype of its products, where they are held in another one.

        Autocast keeps its copies to the end of the forward pass, and so does autograd without
        recomputation. FSDP gathers the feed-forward in that dtype.
        """
        if in_forward and self._recomputes and self._work.product_bytes == FLOAT:
            return 0
        return sum(
            self._cast(each)
            for each in self._layer
            if each.is_matrix and not (self._sharded and each.group == "mlp")
        )

    def _cast(self, weight: Parameters) -> int:
        """Bytes of a copy of `weight` in the dtype of the products; 0 if it is of that dtype."""
        size = weight.size * self._work.product_bytes
        return 0 if size == weight.nbytes else size

    def _gathered(self) -> int:
        """What FSDP has gathered: the layer that computes, and the attention of the next."""
        if not self._sharded:
            return 0
        return sum(
            each.size * self._work.product_bytes if each.group == "mlp" else 2 * each.nbytes
            for each in self._layer
        )

    def _layer_gradients(self) -> int:
        """A layer's gradients before they are added to others.

        Under FSDP those of its feed-forward, and of the attention before, which are being reduced.
        """
        return _gradient_bytes(self._layer)


def _nbytes(parameters: Iterable[Parameters]) -> int:
    return sum(each.nbytes for each in parameters)


def _gradient_bytes(parameters: Iterable[Parameters]) -> int:
    return sum(each.size * FLOAT for each in parameters if each.trained)
