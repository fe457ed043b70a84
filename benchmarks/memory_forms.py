"""The forms of attention that `benchmarks.memory_gain` compares.

Some are settings of the model. The others are no settings, and stand here alone: while `applied`, a
form replaces parts of `Attention`, so that the project's own training and scoring run with it. The
windows are controls without a memory, and see older tokens themselves.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from infini_model.model.layers import Attention, LayerContext
from infini_model.model.rotary import Rope, rope_tables, rotate
from infini_model.model.state import LayerState, empty_memory

# First tokens of a document that a window always sees (StreamingLLM, arXiv 2309.17453).
SINKS = 4


@dataclass(frozen=True)
class Form:
    """A form of attention.

    Attributes:
        model: Settings of the model.
        replacements: Parts of `Attention` by name.
        state: Numbers that a head keeps of what is older than its segment, from the head's width.
        is_window: Whether these are keys and values, which inference may keep in 16 bits.
    """

    model: dict[str, Any]
    replacements: dict[str, Any] = field(default_factory=dict)
    state: Callable[[int], int] = lambda width: 2 * width * width
    is_window: bool = False

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which models that are built and run have this form."""
        with contextlib.ExitStack() as stack:
            for name, part in self.replacements.items():
                stack.enter_context(mock.patch.object(Attention, name, part))
            yield


def window(tokens: int | None, own: int = 32) -> Form:
    """Attention to the nearest `tokens`, the sinks among them; None is to all of the document.

    `own` are those of a segment, which no form counts as its state.
    """

    def forward(
        self: Attention,
        x: Tensor,
        context: LayerContext,
        state: LayerState | None,  # noqa: ARG001 - it trains and scores whole sequences
    ) -> tuple[Tensor, LayerState]:
        q, k, v = self.project(x)
        whole = _rope(x.size(1), self.head_dim, self.config.rope_theta, x.device)
        out = window_attention(
            rotate(q, whole), rotate(k, whole), v, tokens, self.config.segment_length, context.reset
        )
        memory = empty_memory(self.config, k)
        after = self._state_after(q, k, v, k, None, memory, context.rope)
        return self.o_proj(out.transpose(1, 2).flatten(2)), after

    kept = (1024 if tokens is None else tokens) - own
    return Form({"memory": "none"}, {"forward": forward}, lambda width: 2 * width * kept, True)


@functools.cache
def _rope(tokens: int, width: int, theta: float, device: torch.device) -> Rope:
    cos, sin = rope_tables(tokens, width, theta)
    return cos.to(device), sin.to(device)


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, tokens: int | None, length: int, reset: Tensor | None
) -> Tensor:
    """Attention of each token to the nearest of its document, and to the document's first `SINKS`.

    A segment of queries meets the keys of the segments that its window reaches into, and the sinks.

    Args:
        q: Rotated queries [B, H, T, D], whole segments of `length`.
        k: Rotated keys [B, H_kv, T, D].
        v: Values, of the shape of `k`.
        tokens: How many each token sees, itself and the sinks among them; None is all.
        length: Tokens of a segment.
        reset: As in `infini_attention`.
    """
    rows, count = len(q), q.size(2) // length
    arange = functools.partial(torch.arange, device=q.device)
    numbers = arange(count)
    begins = (numbers == 0).expand(rows, count) if reset is None else reset | (numbers == 0)
    documents = begins.cumsum(1)
    if tokens is None:
        of_tokens = documents.repeat_interleave(length, 1)
        mask = (of_tokens[:, :, None] == of_tokens[:, None]).tril()[:, None]
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    reach = tokens - SINKS
    back = min(count, -(-(reach - 1) // length))
    # Where the document of each segment begins.
    starts = torch.where(begins, numbers * length, 0).cummax(1).values

    def met(x: Tensor) -> Tensor:
        """The keys or values that each segment meets, [B · segments, H_kv, K, D]."""
        near = functional.pad(x, (0, 0, back * length, 0)).unfold(2, (back + 1) * length, length)
        places = (starts[..., None] + arange(SINKS)).flatten(1)[:, None, :, None]
        sinks = x.gather(2, places.expand(-1, x.size(1), -1, x.size(3)))
        sinks = sinks.unflatten(2, (count, SINKS))
        return torch.cat((near.transpose(3, 4), sinks), 3).transpose(1, 2).flatten(0, 1)

    ages = arange(length)[:, None] + back * length - arange((back + 1) * length)
    of_keys = functional.pad(documents, (back, 0)).unfold(1, back + 1, 1)
    is_own = (of_keys == documents[..., None]).repeat_interleave(length, 2)[:, :, None]
    is_near = is_own & (ages >= 0) & (ages < reach)
    sink_ages = arange(count * length).view(count, length, 1) - (
        starts[..., None, None] + arange(SINKS)
    )
    mask = torch.cat((is_near, sink_ages >= reach), 3).flatten(0, 1)[:, None]
    queries = q.unflatten(2, (count, length)).transpose(1, 2).flatten(0, 1)
    out = functional.scaled_dot_product_attention(
        queries, met(k), met(v), attn_mask=mask, enable_gqa=True
    )
    return out.unflatten(0, (rows, count)).transpose(1, 2).flatten(2, 3)


def gate_at(index: int, value: float) -> Form:
    """A residual memory that has `value` in place of gate `index` of `Attention.memory_gates`."""
    compute = Attention.memory_gates

    def memory_gates(self: Attention, x: Tensor) -> Tensor | None:
        gates = compute(self, x)
        if gates is None:
            return None
        both = list(gates.unbind(-1))
        both[index] = torch.full_like(both[index], value)
        return torch.stack(both, dim=-1)

    return Form({"memory": "residual"}, {"memory_gates": memory_gates})


FORMS: dict[str, Form] = {
    "none": Form({"memory": "none"}, state=lambda width: 0),  # noqa: ARG005
    "linear": Form({"memory": "linear"}, state=lambda width: width * width + width),
    "residual": Form({"memory": "residual"}),
    "window": window(96),
    "window of equal bytes": window(160),
    "plain": window(None),
    "no write gate": gate_at(0, 1.0),
    "no forget gate": gate_at(1, 0.0),
}
