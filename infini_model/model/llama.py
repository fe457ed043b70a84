"""Infini-Llama: Hugging Face's Llama whose attention carries a compressive memory.

Parameters carry the names of Hugging Face's Llama; each attention adds `gate` and, with the key
shift, `memory_key_shift`. With one segment, or without memory, the model is Llama exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from infini_model.config import AttentionBackend, ModelConfig
from infini_model.model import hf_checkpoint
from infini_model.model.layers import DecoderLayer, LayerState, Step, empty_memory, rope_tables
from infini_model.model.loss import IGNORED, summed_loss
from infini_model.runtime.errors import ConfigError


@dataclass(frozen=True)
class State:
    """What the model carries from one piece of a sequence to the next: constant in size.

    Attributes:
        layers: One `LayerState` a layer.
        position: Tokens seen by each row, [B] int64, on the CPU.
    """

    layers: tuple[LayerState, ...]
    position: Tensor


class ModelOutput(NamedTuple):
    """What `InfiniLlama.forward` gives back; `logits` without labels, `loss` with them."""

    logits: Tensor | None
    loss: Tensor | None
    state: State


class GateStatistics(NamedTuple):
    """The share that a layer's heads give to their memory, sigmoid(gate), over the heads."""

    mean: float
    minimum: float
    maximum: float


class Decoder(nn.Module):
    """Embedding, layers and the last norm: everything but the output layer.

    Attributes:
        gradient_checkpointing: Whether training keeps only what enters each layer and computes the
            layer again in the backward pass (Chen et al., arXiv 1604.06174); off at first.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, vocab_size: int, backend: AttentionBackend) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, backend) for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        cos, sin = rope_tables(
            config.segment_length, config.head_dim, config.rope_theta, config.rope_scaling
        )
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.gradient_checkpointing = False

    def forward(
        self,
        input_ids: Tensor,
        states: tuple[LayerState, ...] | None,
        reset: Tensor | None,
        step: Step | None,
    ) -> tuple[Tensor, tuple[LayerState, ...]]:
        """[B, T] ids to [B, T, hidden] and the layers' states after them."""
        x = self.embed_tokens(input_ids)
        rope, after = (self.cos, self.sin), []
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        for index, layer in enumerate(self.layers):
            inputs = (x, rope, None if states is None else states[index], reset, step)
            # Nothing in a layer is random, so that there is no generator to set back.
            x, new = (
                checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
                if recompute
                else layer(*inputs)
            )
            after.append(new)
        return self.norm(x), tuple(after)


class InfiniLlama(nn.Module):
    """A Llama with Infini-attention (arXiv 2404.07143).

    Weights are drawn from torch's global generator. Parameters whose name ends in `gate` or
    `memory_key_shift` are the memory's own; all others are Llama's.
    """

    def __init__(
        self, config: ModelConfig, *, attention_backend: AttentionBackend = "auto"
    ) -> None:
        """Draw the weights.

        Args:
            config: The shape.
            attention_backend: Kernel of the attention inside segments, as in `LaunchConfig`; it is
                no part of the model, and no checkpoint holds it.

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
            state: State after what came before; None where nothing did.
            labels: [B, T] int64, already aligned: labels[:, t] is the token that follows
                input_ids[:, t]; unlike Hugging Face's models this one does not shift them. -100 is
                left out.
            reset: [B, ceil(T / segment_length)] bool, true where a segment starts a new document;
                needs a sequence that starts on a segment border.

        Returns:
            `ModelOutput`: logits [B, T, vocab_size] without labels; with them the mean over the
            labels that count, float32 (float64 for float64), and the logits are never held whole;
            and the state after the last token.

        Raises:
            ValueError: A shape, or a reset inside a segment.
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
        """Hidden states [B, T, hidden], of which `lm_head` makes logits, and the state after them.

        Arguments and errors are those of `forward`. An objective takes its loss from here.
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
        """Take in a piece of any length: up to the next segment border first, then all at once.

        Arguments and errors are those of `forward`.

        Returns:
            Hidden states [B, T, hidden], of which `lm_head` makes logits, and the state after them.
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
                piece = input_ids[:, start : start + length - filled]
                hidden, state = self.advance(piece, state)
            else:
                piece = input_ids[:, start:]
                reset = self._reset_where_fresh(reset, state, piece)
                hidden, layers = self.model(piece, state.layers, reset, None)
                state = State(layers, state.position + piece.size(1))
            parts.append(hidden)
            start += piece.size(1)
        return torch.cat(parts, dim=1), state

    def _reset_where_fresh(
        self, reset: Tensor | None, state: State, piece: Tensor
    ) -> Tensor | None:
        """`reset`, also true at the first segment of rows that begin: no token is before theirs."""
        fresh = state.position == 0
        if not bool(fresh.any()):
            return reset
        if reset is None:
            segments = -(-piece.size(1) // self.config.segment_length)
            reset = torch.zeros(len(piece), segments, dtype=torch.bool, device=piece.device)
        first = torch.arange(reset.size(1), device=piece.device) == 0
        return reset | (first & fresh.to(piece.device)[:, None])

    def advance(
        self,
        input_ids: Tensor,
        state: State,
        counts: Tensor | None = None,
        *,
        in_place: bool = False,
    ) -> tuple[Tensor, State]:
        """Take in a piece that crosses no segment border; rows may stand at different places.

        Args:
            input_ids: [B, T] int64.
            state: State before the piece.
            counts: [B] int64 on the CPU, how many tokens of each row are real (the rest is
                padding, on the right); None is all of them.
            in_place: Give `state` up: the piece goes into its buffers, which the state after the
                piece takes over, and nothing is copied. Without gradients only.

        Returns:
            Hidden states [B, T, hidden] (meaningless at padding), and the state after the piece.

        Raises:
            ValueError: A row's piece is longer than the rest of its segment.
        """
        length, width = self.config.segment_length, input_ids.size(1)
        if counts is None:
            counts = torch.full_like(state.position, width)
        filled = state.position % length
        end = filled + counts
        if int(end.max()) > length:
            raise ValueError(f"input_ids: {int(end.max()) - length} tokens beyond the segment")
        index = torch.arange(width, device=counts.device)
        slots = torch.where(index < counts[:, None], filled[:, None] + index, length)
        closes = end == length
        device = input_ids.device
        reached = torch.arange(max(1, int(end.max())), device=counts.device)
        step = Step(
            slots=slots.to(device),
            visible=(reached <= slots[:, None, :, None]).to(device),
            closes=closes.to(device) if bool(closes.any()) else None,
            last=(counts - 1).to(device),
            fresh=(state.position == 0).to(device),
            in_place=in_place,
        )
        hidden, layers = self.model(input_ids, state.layers, None, step)
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
        self, whole: Callable[[Tensor], Tensor] = Tensor.detach
    ) -> list[GateStatistics]:
        """The share of the memory in each layer; empty for a model without memory.

        `whole` puts a gate together where it is shared among processes.
        """
        if self.config.memory == "none":
            return []
        statistics = []
        for layer in self.model.layers:
            share = whole(layer.get_parameter("self_attn.gate").detach()).float().sigmoid()
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
        """Read a Hugging Face Llama folder, ours or another's.

        Args:
            folder: Holds config.json and model.safetensors, or its shards and their index.
            dtype: Of the weights in memory, whatever the files hold.
            device: Where the weights go.
            attention_backend: Kernel of the attention inside segments, as in `LaunchConfig`.
            **overrides: Fields of `ModelConfig` to change, such as `segment_length=2048`.

        Raises:
            CheckpointError: A file or tensor is missing, damaged, superfluous, misshapen or
                quantised, or the model is none that this class can hold; one line that names the
                culprit.
        """
        config = hf_checkpoint.read_config(Path(folder), overrides)
        with torch.device("meta"):
            model = cls(config, attention_backend=attention_backend)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        tensors = hf_checkpoint.read_tensors(Path(folder), shapes, dtype)
        if config.tie_word_embeddings:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        model.load_state_dict(tensors, assign=True)
        if config.tie_word_embeddings:  # loading has made two parameters of it
            model.lm_head.weight = model.model.embed_tokens.weight
        return model.to(device)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors (in shards if large), complete or not at all.

        Without memory, `transformers` opens the folder as it is.

        Raises:
            CheckpointError: `folder` holds files of another kind, which would be lost.
            UserError: The folder cannot be written.
        """
        tensors = {name: p.detach() for name, p in self.named_parameters()}
        hf_checkpoint.write_checkpoint(Path(folder), self.config, tensors)
