"""Infini-Llama: a Llama whose attention carries a compressive memory.

Parameters are named as in Hugging Face's Llama; each attention adds `gate` and, with the key shift,
`memory_key_shift`. On a single segment the model is exactly Llama.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from infini_model.config import AttentionBackend, ModelConfig
from infini_model.model import hf_checkpoint
from infini_model.model.layers import Decoder
from infini_model.model.loss import IGNORED, summed_loss
from infini_model.model.state import CacheUpdate, LayerState, State, empty_memory
from infini_model.runtime.errors import ConfigError


class ModelOutput(NamedTuple):
    """The result of `InfiniLlama.forward`: `logits` without labels, `loss` with them."""

    logits: Tensor | None
    loss: Tensor | None
    state: State


class GateStatistics(NamedTuple):
    """sigmoid(gate), the share of the memory in the output, over the heads of one layer."""

    mean: float
    minimum: float
    maximum: float


class InfiniLlama(nn.Module):
    """A Llama with Infini-attention (arXiv 2404.07143).

    Weights are drawn from torch's global generator. Parameters whose names end in `gate` or
    `memory_key_shift` belong to the memory; all others are Llama's.
    """

    def __init__(
        self, config: ModelConfig, *, attention_backend: AttentionBackend = "auto"
    ) -> None:
        """Build the model and initialise its weights.

        Args:
            config: Shape of the model.
            attention_backend: Kernel of the attention inside segments, as in `LaunchConfig`; not
                saved with the model.

        Raises:
            ConfigError: `config.vocab_size` is None.
        """
        super().__init__()
        if config.vocab_size is None:
            raise ConfigError("model.vocab_size: None, but the model needs a number")
        self.config, self.attention_backend = config, attention_backend
        self.model = Decoder(config, config.vocab_size, attention_backend)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=config.initializer_range)

    def forward(
        self,
        input_ids: Tensor,
        state: State | None = None,
        labels: Tensor | None = None,
        reset: Tensor | None = None,
    ) -> ModelOutput:
        """Logits of the next tokens, or the mean loss against `labels`.

        Args:
            input_ids: [B, T] int64.
            state: State after the preceding tokens; None if there are none.
            labels: [B, T] int64, already aligned: labels[:, t] is the token that follows
                input_ids[:, t]. Unlike Hugging Face's models, this one does not shift them. -100 is
                ignored.
            reset: [B, ceil(T / segment_length)] bool, true where a segment starts a new document.
                The sequence must then start on a segment border.

        Returns:
            Without labels, logits [B, T, vocab_size]; with labels, their mean loss, float32
            (float64 for float64), computed without holding all logits at once. In both cases the
            state after the last token.

        Raises:
            ValueError: A shape does not fit, or `reset` is given inside a segment.
        """
        hidden, after = self.hidden(input_ids, state, reset)
        if labels is None:
            return ModelOutput(self.lm_head(hidden), None, after)
        if labels.shape != input_ids.shape:
            raise ValueError(
                f"labels: expected shape {list(input_ids.shape)}, got {list(labels.shape)}"
            )
        total = summed_loss(hidden.flatten(0, 1), self.lm_head.weight, labels.flatten())
        return ModelOutput(None, total / (labels != IGNORED).sum().clamp(min=1), after)

    def hidden(
        self, input_ids: Tensor, state: State | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """The inputs of `lm_head`, [B, T, hidden], and the state after the last token.

        Arguments and errors are those of `forward`. Objectives compute their losses from this.
        """
        if input_ids.dim() != 2 or input_ids.size(1) == 0:
            raise ValueError(f"input_ids: expected [B, T], got {list(input_ids.shape)}")
        if state is not None:
            return self.extend(input_ids, state, reset)
        hidden, layers = self.model(input_ids, None, reset, None)
        position = torch.full((input_ids.size(0),), input_ids.size(1), device="cpu")
        return hidden, State(layers, position)

    def extend(
        self, input_ids: Tensor, state: State, reset: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Process a chunk of any length: up to the next segment border, then all segments at once.

        Arguments and errors are those of `forward`.

        Returns:
            The inputs of `lm_head`, [B, T, hidden], and the state after the last token.
        """
        length, parts, start = self.config.segment_length, [], 0
        if len(state.position) != input_ids.size(0):
            raise ValueError(
                f"state: expected {input_ids.size(0)} rows as input_ids, got {len(state.position)}"
            )
        while start < input_ids.size(1):
            filled = int((state.position % length).max())
            if filled and reset is not None:
                raise ValueError("reset: expected a state that ends on a segment border")
            if filled:
                chunk = input_ids[:, start : start + length - filled]
                hidden, state = self.advance(chunk, state)
            else:
                chunk = input_ids[:, start:]
                reset = self._with_sequence_starts(reset, state, chunk)
                hidden, layers = self.model(chunk, state.layers, reset, None)
                state = State(layers, state.position + chunk.size(1))
            parts.append(hidden)
            start += chunk.size(1)
        return torch.cat(parts, dim=1), state

    def _with_sequence_starts(
        self, reset: Tensor | None, state: State, chunk: Tensor
    ) -> Tensor | None:
        """`reset`, set also at the first segment of each row that has seen no token yet."""
        starts = state.position == 0
        if not bool(starts.any()):
            return reset
        if reset is None:
            segments = -(-chunk.size(1) // self.config.segment_length)
            reset = torch.zeros(len(chunk), segments, dtype=torch.bool, device=chunk.device)
        first = torch.arange(reset.size(1), device=chunk.device) == 0
        return reset | (first & starts.to(chunk.device)[:, None])

    def advance(
        self,
        input_ids: Tensor,
        state: State,
        counts: Tensor | None = None,
        *,
        in_place: bool = False,
    ) -> tuple[Tensor, State]:
        """Process a chunk that crosses no segment border; rows may be at different positions.

        Args:
            input_ids: [B, T] int64.
            state: State before the chunk.
            counts: [B] int64 on the CPU, the number of real tokens in each row; the rest is padding
                on the right. None: all are real.
            in_place: Write to the buffers of `state`, which becomes invalid, instead of copying
                them. Only without gradients.

        Returns:
            The inputs of `lm_head`, [B, T, hidden] (meaningless at padding), and the state after
            the chunk.

        Raises:
            ValueError: A row has more tokens than its segment has room for.
        """
        width = input_ids.size(1)
        if counts is None:
            counts = torch.full_like(state.position, width)
        update = CacheUpdate.plan(
            state.position,
            counts,
            width,
            self.config.segment_length,
            input_ids.device,
            in_place=in_place,
        )
        hidden, layers = self.model(input_ids, state.layers, None, update)
        return hidden, State(layers, state.position + counts)

    def empty_state(self, batch: int) -> State:
        """The state before the first token of `batch` sequences."""
        config, weight = self.config, self.lm_head.weight
        shape = (batch, config.key_value_heads, config.segment_length + 1, config.head_dim)
        layers = []
        for _ in range(config.num_hidden_layers):
            keys, values, memory_keys = (weight.new_zeros(shape) for _ in range(3))
            memory = empty_memory(config, keys)
            layers.append(LayerState(memory, keys, values, memory_keys, keys[:, :, 0]))
        return State(tuple(layers), torch.zeros(batch, dtype=torch.int64, device="cpu"))

    def gate_statistics(
        self, gather: Callable[[Tensor], Tensor] = Tensor.detach
    ) -> list[GateStatistics]:
        """The share of the memory in each layer; empty for a model without memory.

        `gather` assembles a gate that is sharded over processes.
        """
        if self.config.memory == "none":
            return []
        statistics = []
        for layer in self.model.layers:
            share = gather(layer.get_parameter("self_attn.gate").detach()).float().sigmoid()
            statistics.append(
                GateStatistics(share.mean().item(), share.min().item(), share.max().item())
            )
        return statistics

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        attention_backend: AttentionBackend = "auto",
        **overrides: object,
    ) -> Self:
        """Load a Hugging Face Llama folder, with or without Infini-attention.

        Args:
            folder: Holds config.json and model.safetensors, or its shards and their index.
            dtype: Of the loaded weights, whatever the files hold.
            device: Device of the loaded weights.
            attention_backend: Kernel of the attention inside segments, as in `LaunchConfig`.
            **overrides: Fields of `ModelConfig` to change, such as `segment_length=2048`.

        Raises:
            CheckpointError: A file or tensor is missing, damaged, unexpected, quantised or of the
                wrong shape, or the architecture is not supported. The message names the file.
        """
        config = hf_checkpoint.read_config(Path(folder), overrides)
        with torch.device("meta"):
            model = cls(config, attention_backend=attention_backend)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        tensors = hf_checkpoint.read_tensors(Path(folder), shapes, dtype)
        if config.tie_word_embeddings:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        model.load_state_dict(tensors, assign=True)
        if config.tie_word_embeddings:  # load_state_dict has untied them
            model.lm_head.weight = model.model.embed_tokens.weight
        return model.to(device)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors (sharded if large) atomically.

        `transformers` can load the folder of a model without memory.

        Raises:
            CheckpointError: `folder` holds other files, which would be lost.
            UserError: The folder cannot be written.
        """
        tensors = {name: p.detach() for name, p in self.named_parameters()}
        hf_checkpoint.write_checkpoint(Path(folder), self.config, tensors)
