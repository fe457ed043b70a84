"""The forms of attention that `benchmarks.memory_gain` compares.

Some are settings of the model. The others are no settings, and stand here alone: while `applied`, a
form replaces parts of `infini_model.model.layers`, so that the project's own training and scoring
run with it. The windows are controls without a memory, and see older tokens themselves. The
variants of the residual memory are computed plainly, segment by segment.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from infini_model.model import layers
from infini_model.model.attention import segmented_local_attention
from infini_model.model.kernels.numerics import READ_EPSILON, SHARPNESS
from infini_model.model.layers import Attention
from infini_model.model.memory import Memory
from infini_model.model.rotary import Rope, rope_tables, rotate
from infini_model.model.state import LayerState, empty_memory

# First tokens of a document that a window always sees (StreamingLLM, arXiv 2309.17453).
SINKS = 4
# At first a token lets 0.1% fade of what the memory holds: the features of softplus at −7.
DECAY_START = -7.0

Features = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Form:
    """A form of attention.

    Attributes:
        model: Settings of the model.
        replacements: By name, parts of `Attention`, or `infini_attention` itself.
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
                where = layers if name == "infini_attention" else Attention
                stack.enter_context(mock.patch.object(where, name, part))
            yield


def window(tokens: int | None, own: int = 32) -> Form:
    """Attention to the nearest `tokens`, the sinks among them; None is to all of the document.

    `own` are those of a segment, which no form counts as its state.
    """

    def forward(
        self: Attention,
        x: Tensor,
        rope: Rope,
        state: LayerState | None,  # noqa: ARG001 - it trains and scores whole sequences
        reset: Tensor | None,
        streams: int = 1,  # noqa: ARG001
    ) -> tuple[Tensor, LayerState]:
        q, k, v = self.project(x)
        whole = _rope(x.size(1), self.head_dim, self.config.rope_theta)
        out = window_attention(
            rotate(q, whole), rotate(k, whole), v, tokens, self.config.segment_length, reset
        )
        after = self._state_after(q, k, v, k, None, empty_memory(self.config, k), rope)
        return self.o_proj(out.transpose(1, 2).flatten(2)), after

    kept = (1024 if tokens is None else tokens) - own
    return Form({"memory": "none"}, {"forward": forward}, lambda width: 2 * width * kept, True)


@functools.cache
def _rope(tokens: int, width: int, theta: float) -> Rope:
    return rope_tables(tokens, width, theta)


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
    numbers = torch.arange(count)
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
        places = (starts[..., None] + torch.arange(SINKS)).flatten(1)[:, None, :, None]
        sinks = x.gather(2, places.expand(-1, x.size(1), -1, x.size(3)))
        sinks = sinks.unflatten(2, (count, SINKS))
        return torch.cat((near.transpose(3, 4), sinks), 3).transpose(1, 2).flatten(0, 1)

    ages = torch.arange(length)[:, None] + back * length - torch.arange((back + 1) * length)
    of_keys = functional.pad(documents, (back, 0)).unfold(1, back + 1, 1)
    is_own = (of_keys == documents[..., None]).repeat_interleave(length, 2)[:, :, None]
    is_near = is_own & (ages >= 0) & (ages < reach)
    sink_ages = torch.arange(count * length).view(count, length, 1) - (
        starts[..., None, None] + torch.arange(SINKS)
    )
    mask = torch.cat((is_near, sink_ages >= reach), 3).flatten(0, 1)[:, None]
    queries = q.unflatten(2, (count, length)).transpose(1, 2).flatten(0, 1)
    out = functional.scaled_dot_product_attention(
        queries, met(k), met(v), attn_mask=mask, enable_gqa=True
    )
    return out.unflatten(0, (rows, count)).transpose(1, 2).flatten(2, 3)


def variant(features: Features, *, decays: bool = False, shift: bool = True, **parts: Any) -> Form:
    """A residual memory with other features and `parts` of `Attention`.

    One that decays has a second set of write scales, the logarithms of what each token keeps.
    """

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor,
        *,
        segment_length: int,
        reset: Tensor | None,
        memory: Memory | None,
        memory_keys: Tensor,
        memory_values: Tensor,
        memory_queries: Tensor,
        memory_scale: Tensor,
        update: str,  # noqa: ARG001
        **local_options: Any,
    ) -> tuple[Tensor, Memory]:
        local = segmented_local_attention(q, k, v, segment_length=segment_length, **local_options)
        heads, width = k.shape[1::2]
        held = q.new_zeros(len(q), heads, 2 * width, width) if memory is None else memory.kv
        out = []
        for number, start in enumerate(range(0, q.size(2), segment_length)):
            segment = slice(start, start + segment_length)
            if reset is not None:
                held = held.masked_fill(reset[:, number].view(-1, 1, 1, 1), 0.0)
            states = held.repeat_interleave(q.size(1) // heads, 1)
            read = features(memory_queries[:, :, segment]) @ states
            normed = read * (read.square().mean(-1, keepdim=True) + READ_EPSILON).rsqrt()
            out.append(local[:, :, segment] + weight.unsqueeze(1) * normed)
            if start + segment_length <= q.size(2):
                scale, kept = memory_scale[:, :heads, segment], 1.0
                if decays:
                    fading = memory_scale[:, heads:, segment]
                    total = fading.sum(-1, keepdim=True)
                    scale = scale * (total - fading.cumsum(-1)).exp()
                    kept = total.exp().unsqueeze(-1)
                written = scale.unsqueeze(-1) * features(memory_keys[:, :, segment])
                held = kept * held + written.mT @ memory_values[:, :, segment]
        return torch.cat(out, 2), Memory(held, None)

    settings = {"memory": "residual", "memory_key_shift": shift}
    return Form(settings, {"infini_attention": attention, **parts})


def softmaxes(sharpness: float = SHARPNESS) -> Features:
    """[softmax(c x), softmax(−c x)], c being the sharpness."""

    def features(x: Tensor) -> Tensor:
        x = sharpness * x
        return torch.cat((x.softmax(-1), (-x).softmax(-1)), -1)

    return features


def squared_relus(x: Tensor) -> Tensor:
    """[ReLU(x), ReLU(−x)]², without a softmax."""
    return torch.cat((x.relu(), (-x).relu()), -1).square()


def gate_with(bias: float) -> dict[str, Any]:
    """β = sigmoid(W x + bias)."""

    def write_scale(self: Attention, x: Tensor) -> Tensor:
        return (functional.linear(x, self.memory_write_gate) + bias).sigmoid().transpose(1, 2)

    return {"write_scale": write_scale}


def open_gate(self: Attention, x: Tensor) -> Tensor:
    """β = 1."""
    return x.new_ones(len(x), self.config.key_value_heads, x.size(1))


def _built_with(change: Callable[[Attention], None]) -> Callable[..., None]:
    """An `__init__` of `Attention` that ends with `change`."""
    build = Attention.__init__

    def init(self: Attention, *arguments: Any) -> None:
        build(self, *arguments)
        change(self)

    return init


def taps(count: int) -> dict[str, Any]:
    """Memory keys that are learned sums of those of the last `count` tokens of a document."""

    def change(attention: Attention) -> None:
        shares = torch.zeros(attention.config.key_value_heads, count)
        shares[:, :2] = 0.5
        attention.memory_key_shift = nn.Parameter(shares)

    def shift_keys(
        self: Attention,
        k: Tensor,
        previous: Tensor | None,  # noqa: ARG001
        starts: Tensor | None,
    ) -> Tensor:
        total, alive = torch.zeros_like(k), k.new_ones(len(k), 1, k.size(2), 1)
        for age, share in enumerate(self.memory_key_shift.unbind(1)):
            moved = functional.pad(k, (0, 0, age, 0))[:, :, : k.size(2)]
            total = total + share.view(-1, 1, 1) * moved * alive
            if starts is not None:
                begun = functional.pad(starts, (age, 0))[:, : k.size(2)]
                alive = alive * ~begun[:, None, :, None]
        return total

    return {"__init__": _built_with(change), "shift_keys": shift_keys}


def decay(start: float = DECAY_START, bias: float = 0.0) -> dict[str, Any]:
    """What each token keeps of the memory is learned from it (arXiv 2412.06464).

    `start` is what softplus makes the initial decay of; `bias` is that of `gate_with`.
    """

    def change(attention: Attention) -> None:
        gates = attention.memory_write_gate.detach()
        attention.memory_write_gate = nn.Parameter(gates.repeat(2, 1))

    def write_scale(self: Attention, x: Tensor) -> Tensor:
        written, fading = functional.linear(x, self.memory_write_gate).transpose(1, 2).chunk(2, 1)
        scale, fading = (written + bias).sigmoid(), -functional.softplus(fading + start)
        return torch.cat((scale, fading), 1)

    return {"__init__": _built_with(change), "write_scale": write_scale}


FORMS: dict[str, Form] = {
    "none": Form({"memory": "none"}, state=lambda width: 0),  # noqa: ARG005
    "linear": Form({"memory": "linear"}, state=lambda width: width * width + width),
    "residual": Form({"memory": "residual"}),
    "window": window(96),
    "window of equal bytes": window(160),
    "plain": window(None),
    "sharpness 0.5": variant(softmaxes(0.5)),
    "sharpness 1": variant(softmaxes(1.0)),
    "sharpness 2": variant(softmaxes(2.0)),
    "sharpness 4": variant(softmaxes(4.0)),
    "sharpness 8": variant(softmaxes(8.0)),
    "squared ReLU": variant(squared_relus),
    "write gate from 0.1": variant(softmaxes(), **gate_with(-2.2)),
    "write gate from 0.9": variant(softmaxes(), **gate_with(2.2)),
    "no write gate": variant(softmaxes(), write_scale=open_gate),
    "decay": variant(softmaxes(), decays=True, **decay()),
    "decay from 0.7%": variant(softmaxes(), decays=True, **decay(-5.0)),
    "decay, write gate from 0.9": variant(softmaxes(), decays=True, **decay(bias=2.2)),
    "decay, no write gate": variant(softmaxes(), decays=True, **decay(bias=math.inf)),
    "four taps": variant(softmaxes(), **taps(4)),
    "four taps, sharpness 1": variant(softmaxes(1.0), **taps(4)),
    "no key shift, sharpness 1": variant(softmaxes(1.0), shift=False),
}
