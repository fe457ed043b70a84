"""The forms of attention that `benchmarks.memory_gain` compares.

Some are settings of the model. The others are no settings, and stand here alone: while `applied`, a
form replaces a part of the model, so that the project's own training and scoring run with it. The
sliding windows are controls without a memory, and see older tokens themselves.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gated_delta import GatedDelta
from infini_model.config import ModelConfig
from infini_model.model.layers import Attention, Decoder, LayerContext
from infini_model.model.memory import RULES
from infini_model.model.memory.residual import Residual
from infini_model.model.rotary import Rope, rope_tables, rotate
from infini_model.model.state import LayerState

# First tokens of a document that a window always sees (StreamingLLM, arXiv 2309.17453).
SINKS = 4
# Tokens of a segment and of a training window in `benchmarks.memory_gain`.
SEGMENT, WINDOW = 32, 1024
THETA: float = ModelConfig.model_fields["rope_theta"].default


@dataclass(frozen=True)
class Form:
    """A form of attention.

    Attributes:
        model: Settings of the model.
        applied: A context in which models that are built and run have this form.
        memory: Numbers in a head's memory, from the head's width; the few tokens before a shift or
            a convolution are not counted.
        older: Tokens before its own segment whose keys and values a head keeps.
    """

    model: dict[str, Any]
    applied: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    memory: Callable[[int], int] = lambda width: 0  # noqa: ARG005
    older: int = 0

    def state(self, width: int) -> int:
        """Numbers that a head of this width keeps of what is older than its segment."""
        return self.memory(width) + 2 * width * self.older

    def state_bytes(self, width: int) -> int:
        """Their bytes, where keys and values of a window are kept in 16 bits."""
        return 4 * self.memory(width) + 4 * width * self.older


def window(tokens: int | None, sinks: int = SINKS) -> Form:
    """Attention to the nearest `tokens`, the sinks among them; None is to all of the document."""

    def forward(
        self: Attention,
        x: Tensor,
        context: LayerContext,
        state: LayerState | None,  # noqa: ARG001 - it trains and scores whole sequences
    ) -> tuple[Tensor, None]:
        q, k, v = self.project(x, context.query_scale)
        whole = _rope(x.size(1), self.head_dim, x.device)
        length, starts = context.window.segment_length, context.document_starts
        out = window_attention(
            rotate(q, whole), rotate(k, whole), v, tokens, length, starts, sinks=sinks
        )
        return self.o_proj(out.transpose(1, 2).flatten(2)), None

    applied = functools.partial(mock.patch.object, Attention, "forward", forward)
    older = (WINDOW if tokens is None else tokens) - SEGMENT
    return Form({"memory": "none"}, applied, older=older)


@functools.cache
def _rope(tokens: int, width: int, device: torch.device) -> Rope:
    cos, sin = rope_tables(tokens, width, THETA)
    return cos.to(device), sin.to(device)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tokens: int | None,
    length: int,
    document_starts: Tensor | None,
    *,
    sinks: int = SINKS,
) -> Tensor:
    """Attention of each token to the nearest of its document, and to the document's first `sinks`.

    A segment of queries meets the keys of the segments that its window reaches into, and the sinks.

    Args:
        q: Rotated queries [B, H, T, D], whole segments of `length`.
        k: Rotated keys [B, H_kv, T, D].
        v: Values, of the shape of `k`.
        tokens: How many each token sees, itself and the sinks among them; None is all.
        length: Tokens of a segment.
        document_starts: As in `infini_attention`.
        sinks: First tokens of a document that are always seen.
    """
    rows, count = len(q), q.size(2) // length
    arange = functools.partial(torch.arange, device=q.device)
    numbers = arange(count)
    begins = (numbers == 0).expand(rows, count)
    if document_starts is not None:
        begins = begins | document_starts
    documents = begins.cumsum(1)
    if tokens is None:
        of_tokens = documents.repeat_interleave(length, 1)
        mask = (of_tokens[:, :, None] == of_tokens[:, None]).tril()[:, None]
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    reach = tokens - sinks
    back = min(count, -(-(reach - 1) // length))
    # Where the document of each segment begins.
    starts = torch.where(begins, numbers * length, 0).cummax(1).values

    def met(x: Tensor) -> Tensor:
        """The keys or values that each segment meets, [B · segments, H_kv, K, D]."""
        near = functional.pad(x, (0, 0, back * length, 0)).unfold(2, (back + 1) * length, length)
        places = (starts[..., None] + arange(sinks)).flatten(1)[:, None, :, None]
        first = x.gather(2, places.expand(-1, x.size(1), -1, x.size(3)))
        first = first.unflatten(2, (count, sinks))
        return torch.cat((near.transpose(3, 4), first), 3).transpose(1, 2).flatten(0, 1)

    ages = arange(length)[:, None] + back * length - arange((back + 1) * length)
    of_keys = functional.pad(documents, (back, 0)).unfold(1, back + 1, 1)
    is_own = (of_keys == documents[..., None]).repeat_interleave(length, 2)[:, :, None]
    is_near = is_own & (ages >= 0) & (ages < reach)
    sink_ages = arange(count * length).view(count, length, 1) - (
        starts[..., None, None] + arange(sinks)
    )
    mask = torch.cat((is_near, sink_ages >= reach), 3).flatten(0, 1)[:, None]
    queries = q.unflatten(2, (count, length)).transpose(1, 2).flatten(0, 1)
    out = functional.scaled_dot_product_attention(
        queries, met(k), met(v), attn_mask=mask, enable_gqa=True
    )
    return out.unflatten(0, (rows, count)).transpose(1, 2).flatten(2, 3)


def gate_at(index: int, value: float) -> Form:
    """A residual memory that has `value` in place of gate `index` of `Residual.token_gates`."""
    compute = Residual.token_gates

    def token_gates(self: Residual, x: Tensor) -> Tensor:
        both = list(compute(self, x).unbind(-1))
        both[index] = torch.full_like(both[index], value)
        return torch.stack(both, dim=-1)

    applied = functools.partial(mock.patch.object, Residual, "token_gates", token_gates)
    return Form({"memory": "residual"}, applied, _residual)


@contextlib.contextmanager
def _gated_delta() -> Iterator[None]:
    """Gated DeltaNet as the residual memory; its loop over segments takes minutes to compile."""
    compile_layers = Decoder.compile_layers
    with (
        mock.patch.dict(RULES, residual=GatedDelta),
        mock.patch.object(
            Decoder,
            "compile_layers",
            lambda self, **_: compile_layers(self, attention=False),
        ),
    ):
        yield


def _residual(width: int) -> int:
    return 2 * width * width


FORMS: dict[str, Form] = {
    "none": Form({"memory": "none"}),
    "linear": Form({"memory": "linear"}, memory=lambda width: width * width + width),
    "residual": Form({"memory": "residual"}, memory=_residual),
    # As large a state as a residual memory's, then as that with the segment before it.
    "window": window(96),
    "window without sinks": window(96, sinks=0),
    "window of 128": window(128),
    "window of 128 without sinks": window(128, sinks=0),
    "window of equal bytes": window(160),
    "plain": window(None),
    "segment before": Form({"memory": "none", "window_segments": 1}, older=SEGMENT),
    "residual + window": Form(
        {"memory": "residual", "window_segments": 1}, memory=_residual, older=SEGMENT
    ),
    # It takes the place of a rule that `model.memory` can name.
    "gated delta + window": Form(
        {"memory": "residual", "memory_key_shift": False, "window_segments": 1},
        _gated_delta,
        memory=lambda width: width * width,
        older=SEGMENT,
    ),
    "no write gate": gate_at(0, 1.0),
    "no forget gate": gate_at(1, 0.0),
}
