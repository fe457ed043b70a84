"""Infini-Llama: a Llama whose attention carries a compressive memory.

Parameters are named as in Hugging Face's Llama; each attention adds those of the rule of its memory
(`infini_model.model.memory`). While nothing is read from that, the model is exactly Llama as far as
its window reaches. With `bidirectional` each position sees its whole segment: without a past it is
LLaDA (arXiv 2502.09992), with one it is a model of block diffusion (arXiv 2503.09573) whose past is
memory and window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from infini_model.config import AttentionBackend, LoraConfig, ModelConfig
from infini_model.model.cache import CacheUpdate
from infini_model.model.hf.adapter import read_adapter, read_adapter_tensors
from infini_model.model.hf.config import read_config
from infini_model.model.hf.weights import (
    checked_tensors,
    read_tensors,
    refuse_other_files,
    with_own_output,
    write_files,
)
from infini_model.model.layers import Attention, Decoder, Part
from infini_model.model.lora import add_lora, initial_adapters, is_adapter, merged_tensors
from infini_model.model.loss import IGNORED, fused_linear_cross_entropy
from infini_model.model.memory import MEMORY_PARAMETERS
from infini_model.model.precision import PRECISIONS
from infini_model.model.state import LayerState, State
from infini_model.runtime.errors import ConfigError
from infini_model.runtime.storage import atomic_folder


class ModelOutput(NamedTuple):
    """The result of `InfiniLlama.forward`: `logits` without labels, `loss` with them."""

    logits: Tensor | None
    loss: Tensor | None
    state: State


class InfiniLlama(nn.Module):
    """A Llama with Infini-attention (arXiv 2404.07143).

    Weights are drawn from torch's global generator. Parameters whose names end as one of
    `MEMORY_PARAMETERS` belong to the memory; all others are Llama's.

    Attributes:
        precision: That of the matrix products in generation; by default that of the weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        attention_backend: AttentionBackend = "auto",
        lora: LoraConfig | None = None,
    ) -> None:
        """Build the model and initialise its weights.

        Args:
            config: Shape of the model.
            attention_backend: Kernel of the attention inside segments, as in `LaunchConfig`; not
                saved with the model.
            lora: Freezes the model but for adapters, which are on `meta` until `assign`.

        Raises:
            ConfigError: `config.vocab_size` is None.
        """
        super().__init__()
        if config.vocab_size is None:
            raise ConfigError("model.vocab_size: None, but the model needs a number")
        self.config, self.attention_backend, self.lora = config, attention_backend, lora
        self.precision = PRECISIONS["fp32"]
        self.model = Decoder(config, config.vocab_size, attention_backend)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding) and not module.weight.is_meta:
                nn.init.normal_(module.weight, std=config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if lora is not None:
            add_lora(self, lora)

    def forward(
        self,
        input_ids: Tensor,
        state: State | None = None,
        labels: Tensor | None = None,
        document_starts: Tensor | None = None,
    ) -> ModelOutput:
        """Logits of the next tokens, or the mean loss against `labels`.

        Those of a bidirectional model are of the tokens at the same positions.

        Args:
            input_ids: [B, T] int64.
            state: State after the preceding tokens; None if there are none.
            labels: [B, T] int64, already aligned: labels[:, t] is the token that follows
                input_ids[:, t], or in a bidirectional model the one at t itself. Unlike Hugging
                Face's models, this one does not shift them. -100 is ignored.
            document_starts: [B, ceil(T / segment_length)] bool, true where a segment starts a new
                document, which knows nothing of what precedes it. The sequence must then start on a
                segment border.

        Returns:
            Without labels, logits [B, T, vocab_size]; with labels, their mean loss, float32
            (float64 for float64), computed without holding all logits at once. In both cases the
            state after the last token.

        Raises:
            ValueError: A shape does not fit, `document_starts` is given inside a segment, or a
                bidirectional model is given a state without a past or inside a segment.
        """
        hidden, after = self.extend(input_ids, state, document_starts)
        if labels is None:
            return ModelOutput(self.lm_head(hidden), None, after)
        if labels.shape != input_ids.shape:
            raise ValueError(
                f"labels: expected shape {list(input_ids.shape)}, got {list(labels.shape)}"
            )
        total = fused_linear_cross_entropy(
            hidden.flatten(0, 1), self.lm_head.weight, labels.flatten()
        )
        return ModelOutput(None, total / (labels != IGNORED).sum().clamp(min=1), after)

    def hidden(
        self,
        input_ids: Tensor,
        document_starts: Tensor | None = None,
        without: Part | None = None,
        *,
        past_ids: Tensor | None = None,
    ) -> Tensor:
        """The inputs of `lm_head`, [B, T, hidden], of whole texts, given as to `forward`.

        Objectives compute their losses from this: no state is built.

        Args:
            input_ids: [B, T] int64.
            document_starts: As in `forward`.
            without: A part of the attention that is knocked out, to measure what it contributes.
            past_ids: What segments have as their past, in both parts of the attention, if that is
                not `input_ids`: whole segments of the same texts, of the same shape. They pass
                through the model beside these, as a second stream of the same weights.

        Raises:
            ValueError: `input_ids` is not [B, T], or `past_ids` does not fit.
        """
        self._check_shape(input_ids)
        ids, length = input_ids, self.config.segment_length
        if past_ids is not None:
            if past_ids.shape != input_ids.shape or input_ids.size(1) % length:
                raise ValueError(
                    f"input_ids: expected whole segments of {length} as "
                    f"{list(past_ids.shape)}, got {list(input_ids.shape)}"
                )
            ids = torch.cat((past_ids, input_ids))
        hidden: Tensor = self.model(
            *(ids, None, document_starts),
            streams=1 if past_ids is None else 2,
            keep_state=False,
            without=without,
        )[0]
        return hidden if past_ids is None else hidden[len(input_ids) :]

    @staticmethod
    def _check_shape(input_ids: Tensor) -> None:
        if input_ids.dim() != 2 or input_ids.size(1) == 0:
            raise ValueError(f"input_ids: expected [B, T], got {list(input_ids.shape)}")

    def extend(
        self,
        input_ids: Tensor,
        state: State | None,
        document_starts: Tensor | None = None,
        *,
        counts: Tensor | None = None,
        in_place: bool = False,
    ) -> tuple[Tensor, State]:
        """Process a chunk of any length: up to the next segment border, then all segments at once.

        Arguments and errors are those of `forward`; `counts`, without `document_starts`, and
        `in_place` are those of `advance`.

        Returns:
            The inputs of `lm_head`, [B, T, hidden], and the state after the last token.
        """
        self._check_shape(input_ids)
        if counts is not None and int(counts.min()) == input_ids.size(1):
            counts = None
        if state is None and counts is not None:
            state = self.empty_state(len(input_ids))
        if state is None:
            hidden, layers = self.model(input_ids, document_starts=document_starts)
            seen = torch.zeros(len(input_ids), dtype=torch.int64, device="cpu")
            return hidden, State(layers, self._position(seen, input_ids, document_starts))
        self._refuse_without_state()
        length, parts, start = self.config.segment_length, [], 0
        if len(state.position) != input_ids.size(0):
            raise ValueError(
                f"state: expected {input_ids.size(0)} rows as input_ids, got {len(state.position)}"
            )
        while start < input_ids.size(1):
            reading = state.position if counts is None else state.position[counts > start]
            filled = int((reading % length).max()) if len(reading) else 0
            if filled and document_starts is not None:
                raise ValueError("document_starts: expected a state that ends on a segment border")
            # All rows have tokens for so long.
            left = input_ids.size(1) if counts is None else int(counts.min())
            end = input_ids.size(1) if counts is None else start + (left - start) // length * length
            if filled or end <= start:
                chunk = input_ids[:, start : start + length - filled]
                real = None if counts is None else (counts - start).clamp(0, chunk.size(1))
                hidden, state = self.advance(chunk, state, real, in_place=in_place)
            else:
                chunk = input_ids[:, start:end]
                starts = self._with_sequence_starts(document_starts, state, chunk)
                hidden, layers = self.model(chunk, state, starts)
                state = State(layers, self._position(state.position, chunk, starts))
            parts.append(hidden)
            start += chunk.size(1)
        return torch.cat(parts, dim=1), state

    def _position(self, before: Tensor, chunk: Tensor, starts: Tensor | None) -> Tensor:
        """`State.position` after a chunk that starts on a segment border."""
        if starts is None:
            return before + chunk.size(1)
        starts, length = starts.cpu(), self.config.segment_length
        last = torch.where(starts, torch.arange(starts.size(1)), -1).amax(1)
        return chunk.size(1) + torch.where(last < 0, before, -length * last)

    def _with_sequence_starts(
        self, document_starts: Tensor | None, state: State, chunk: Tensor
    ) -> Tensor | None:
        """`document_starts`, with the first segment of each row that has seen no token yet."""
        starts = state.position == 0
        if not bool(starts.any()):
            return document_starts
        segments = -(-chunk.size(1) // self.config.segment_length)
        first = torch.arange(segments, device=chunk.device) == 0
        starts = first & starts.to(chunk.device)[:, None]
        return starts if document_starts is None else document_starts | starts

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
            ValueError: A row has more tokens than its segment has room for, or the model is
                bidirectional.
        """
        if self.config.bidirectional:
            raise ConfigError("model.bidirectional: a bidirectional segment has no state to extend")
        if counts is None:
            counts = torch.full_like(state.position, input_ids.size(1))
        update = CacheUpdate.plan(
            state.position, counts, input_ids, self.model.window, in_place=in_place
        )
        hidden, layers = self.model(input_ids, state, None, update)
        return hidden, State(layers, state.position + counts)

    def empty_state(self, batch: int) -> State:
        """The state before the first token of `batch` sequences.

        Raises `ValueError` if the model is bidirectional without a past.
        """
        self._refuse_without_state()
        config, like, layers = self.config, self.model.norm.weight, list[LayerState]()
        for attention in self.attentions:
            shape = (batch, config.key_value_heads, self.model.window.kept, config.head_dim)
            keys, values = like.new_zeros(shape), like.new_zeros(shape)
            rule = attention.memory
            state = None if rule is None else rule.empty_state(batch, config, like)
            layers.append(LayerState(keys, values, state))
        return State(tuple(layers), torch.zeros(batch, dtype=torch.int64, device="cpu"))

    def _refuse_without_state(self) -> None:
        if self.config.bidirectional and not self.config.has_past:
            raise ConfigError("model.bidirectional: a bidirectional segment has no state to extend")

    @property
    def attentions(self) -> list[Attention]:
        """The attention of each layer."""
        return [cast("Attention", layer.get_submodule("self_attn")) for layer in self.model.layers]

    def read_strengths(self, gather: Callable[[Tensor], Tensor] = Tensor.detach) -> list[Tensor]:
        """`Rule.strength` of each layer that has a memory, [H] each.

        `gather` assembles a weight that is sharded over processes.
        """
        rules = (each.memory for each in self.attentions if each.memory is not None)
        return [rule.strength(gather(rule.read_weight.detach())) for rule in rules]

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        attention_backend: AttentionBackend = "auto",
        lora: LoraConfig | None = None,
        adapter: str | Path | None = None,
        **overrides: object,
    ) -> Self:
        """Load a Hugging Face folder of a Llama or one of its kind, with or without a memory.

        Args:
            folder: Holds config.json and model.safetensors, or its shards and their index.
            dtype: Of the loaded weights, whatever the files hold. With LoRA the frozen matrices
                are bfloat16 and all else is float32.
            device: Device of the loaded weights.
            attention_backend: Kernel of the attention inside segments, as in `LaunchConfig`.
            lora: Freezes the weights, and puts new adapters beside them.
            adapter: A folder of trained adapters, with settings and shape of its own.
            **overrides: Fields of `ModelConfig` to change, such as `segment_length=2048`. A larger
                `vocab_size` appends rows, each the mean of the folder's, to the embedding and the
                output layer.

        Raises:
            CheckpointError: A file or tensor is missing, damaged, unexpected, quantised or of the
                wrong shape, or the architecture is not supported. The message names the file.
        """
        if adapter is not None:
            lora = read_adapter(Path(adapter)).lora
        config = with_own_output(Path(folder), read_config(Path(adapter or folder), overrides))
        with torch.device("meta"):
            model = cls(config, attention_backend=attention_backend, lora=lora)
        shapes = model._shapes()
        # An adapter brings the memory that a plain Llama lacks.
        absent = MEMORY_PARAMETERS if adapter is not None else ()
        base = {n: s for n, s in shapes.items() if not is_adapter(n) and not n.endswith(absent)}
        dtypes = {n: p.dtype if lora else dtype for n, p in model.named_parameters()}
        tensors = read_tensors(Path(folder), base, dtypes, config)
        if adapter is not None:
            every = model.named_parameters(remove_duplicate=False)
            trained = {name: tuple(p.shape) for name, p in every if p.requires_grad}
            tensors |= read_adapter_tensors(Path(adapter), trained)
        elif lora is not None:
            tensors |= initial_adapters(model, tensors)
        model.assign(tensors)
        return model.to(device)

    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        """Make `tensors`, by the names of `named_parameters`, the parameters, without a copy."""
        tied = {}
        if self.config.tie_word_embeddings:
            tied = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
        self.load_state_dict({**tensors, **tied}, assign=True)
        if tied:  # load_state_dict has untied them
            self.lm_head.weight = self.model.embed_tokens.weight

    @classmethod
    def check_pretrained(cls, folder: str | Path, **overrides: object) -> ModelConfig:
        """Check a folder as `from_pretrained` does, by the headers of its files.

        Returns the shape of the model that `from_pretrained` loads. Raises `CheckpointError`.
        """
        config = with_own_output(Path(folder), read_config(Path(folder), overrides))
        with torch.device("meta"):
            model = cls(config)
        checked_tensors(Path(folder), model._shapes())
        return config

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in self.named_parameters()}

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors (sharded if large) atomically.

        Adapters are merged into the weights.

        `transformers` can load the folder of a causal model without a past; see
        `infini_model.model.hf`.

        Raises:
            CheckpointError: `folder` holds other files, which would be lost.
            UserError: The folder cannot be written.
        """
        refuse_other_files(Path(folder))
        with atomic_folder(Path(folder)) as temporary:
            write_files(temporary, self.config, self.whole_tensors())

    def whole_tensors(self) -> Mapping[str, Tensor]:
        """The parameters by name; with LoRA those of the merged model, in 16 bits."""
        if self.lora is not None:
            return merged_tensors(self)
        return {name: p.detach() for name, p in self.named_parameters()}
