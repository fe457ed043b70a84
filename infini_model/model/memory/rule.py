"""The interface of a rule of the memory, and what all rules share.

A loop over segments keeps a GPU waiting: each step is small and depends on the last. But only the
memory is sequential. So the memory before every segment is computed first, by the `states` of a
rule, then all segments read theirs as one batch. Results and gradients are those of the loop (for
the default, `infini_model.hf.modeling_infini_llama`), and gradients flow to the first segment.

All rules share the key shift: a value is written under a mix of its own token's key and the
previous token's. The query shift is the same for the queries that read the memory. A masked token
does not know what it is to ask for; with the shift, the token before it asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from infini_model.config import ModelConfig
from infini_model.model.cache import CacheUpdate
from infini_model.model.kernels.memory_ops import memory_dtype, shifted_keys
from infini_model.model.window import segmented

# The parameters that any rule may have beside its own.
SHIFTS = ("memory_key_shift", "memory_query_shift")


class Memory(NamedTuple):
    """The memory of one layer: M and z of the paper (arXiv 2404.07143), constant in size.

    Attributes:
        kv: M = Σσ(k)ᵀv over all written tokens, [B, H_kv, D, D], float32 (float64 for float64); of
            the residual rule S = Σβφ(k)ᵀv, which fades, [B, H_kv, 2 D, D].
        norm: z = Σσ(k), the normaliser, [B, H_kv, D], of the same dtype; None of the residual rule.
    """

    kv: Tensor
    norm: Tensor | None

    def map(self, function: Callable[..., Tensor], *others: Memory) -> Memory:
        """The results of `function`, called with the parts of this memory and of others like it."""
        norms = [each.norm for each in (self, *others) if each.norm is not None]
        kv = function(*(each.kv for each in (self, *others)))
        return Memory(kv, function(*norms) if norms else None)


class RuleState(NamedTuple):
    """The state of one layer's memory, with a cache of the open segment.

    Attributes:
        memory: Memory of all full segments.
        keys: The keys under which the values of the open segment will be written, [B, H_kv, m, D],
            with slots as those of `LayerState`.
        gates: Of each of its tokens, [B, H_kv, m, 2]; None of a rule without.
        last_key: Key of the last token before the key shift, [B, H_kv, D].
        last_query: Its query before the query shift, [B, H, D]; None in a model without that shift.
    """

    memory: Memory
    keys: Tensor
    gates: Tensor | None
    last_key: Tensor
    last_query: Tensor | None


class Rule(nn.Module):
    """The memory of one layer: its parameters, what a segment writes and what a query reads.

    Attributes:
        parameter_names: The rule's own parameters; the first is the `read_weight`.
        read_weight_dims: 1 if that is [H], 2 if it is [H, D].
        features: Width of a key's features, in widths of a head.
        is_normalised: Whether the memory has a `norm`.
        is_gated: Whether each token has gates.
        pretrained_shift: Where shifts start beside pretrained weights.
        activations: Times the width of all heads that training keeps of a token.
        states_kept: Memories that training keeps of a segment.
    """

    parameter_names: ClassVar[tuple[str, ...]]
    read_weight_dims: ClassVar[int] = 1
    features: ClassVar[int] = 1
    is_normalised: ClassVar[bool] = False
    is_gated: ClassVar[bool] = False
    pretrained_shift: ClassVar[float] = 0.0
    activations: ClassVar[int]
    states_kept: ClassVar[int]
    memory_key_shift: nn.Parameter | None
    memory_query_shift: nn.Parameter | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.segment_length = config.segment_length
        for name, values in self.start(config).items():
            self.register_parameter(name, nn.Parameter(values))
        heads = config.key_value_heads, config.num_attention_heads
        chosen = config.memory_key_shift, config.memory_query_shift
        for name, count, is_on in zip(SHIFTS, heads, chosen, strict=True):
            shift = nn.Parameter(torch.full((count,), 0.5)) if is_on else None
            self.register_parameter(name, shift)

    @property
    def read_weight(self) -> Tensor:
        """The parameter that weighs what is read."""
        return self.get_parameter(self.parameter_names[0])

    @staticmethod
    def start(config: ModelConfig) -> dict[str, Tensor]:
        """The initial values of `parameter_names`."""
        raise NotImplementedError

    @staticmethod
    def strength(read_weight: Tensor) -> Tensor:
        """Return how much each head reads, [H], with such a `read_weight`."""
        raise NotImplementedError

    def token_gates(self, x: Tensor) -> Tensor | None:  # noqa: ARG002 - for rules that have some
        """The `gates` of `states` for the inputs `x` [B, T, hidden] of the layer."""
        return None

    def shifted(
        self, q: Tensor, k: Tensor, state: RuleState | None, starts: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The queries that read the memory, and the keys under which values are written.

        `q` and `k` are those before the rotation; all arguments are as in `forward`.
        """
        by_token = last_key = last_query = None
        if starts is not None:
            padding = (0, self.segment_length - 1)
            by_token = functional.pad(starts.unsqueeze(-1), padding).flatten(1)[:, : k.size(2)]
        if state is not None:
            last_key, last_query = state.last_key, state.last_query
        keys = _with_previous(k, self.memory_key_shift, last_key, by_token)
        if len(q) == len(k):
            return _with_previous(q, self.memory_query_shift, last_query, by_token), keys
        shift = self.memory_query_shift, by_token, len(k), self.segment_length
        return _streams_with_previous(q, *shift), keys

    def forward(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        values: Tensor,
        local: Tensor,
        state: RuleState | None,
        starts: Tensor | CacheUpdate | None,
        *,
        keep_state: bool = True,
    ) -> tuple[Tensor, RuleState | None]:
        """Read the memory for all segments of a pass, and write them to it; or `advance`.

        Args:
            x: Inputs of the layer for the rows that are written, [B, T, hidden].
            q: Queries before the rotation, [n · B, H, T, D]; row i reads the memory of row i mod B.
            k: Keys before the rotation, [B, H_kv, T, D].
            values: Values that are written, of the shape of `k`.
            local: The attention of the window, [n · B, S, H, L, D]; so is the result.
            state: State before the pass; None is empty.
            starts: [B, S] bool, true where a segment starts a document; None is nowhere. Or the
                update of a chunk, as in `advance`.
            keep_state: Whether there is a state after the pass, to be returned.
        """
        if isinstance(starts, CacheUpdate):
            return self.advance(x, q, k, values, local, cast("RuleState", state), starts)
        if local.size(1) == 1 and state is None and not keep_state:
            # There is nothing to read or write, but each parameter needs a gradient.
            return local + 0.0 * sum(each.flatten()[0] for each in self.parameters()), None
        (queries, keys), gates = self.shifted(q, k, state, starts), self.token_gates(x)
        memory = self.empty(k) if state is None else state.memory
        written = k.size(2) // self.segment_length
        if not keep_state:  # nothing reads what the last segment would write
            written = min(written, local.size(1) - 1)
        out, after = self.over_segments(
            *(queries, local, self.read_weight, keys, values, gates, memory, starts), full=written
        )
        if not keep_state:
            return out, None
        full = written * self.segment_length
        # Copies: views would keep the whole sequence and all its memories in the state.
        return out, RuleState(
            after.map(Tensor.clone),
            keys[:, :, full:].clone(),
            None if gates is None else gates[:, :, full:].clone(),
            k[:, :, -1].clone(),
            None if self.memory_query_shift is None else q[: len(k), :, -1].clone(),
        )

    def advance(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        values: Tensor,
        local: Tensor,
        state: RuleState,
        update: CacheUpdate,
    ) -> tuple[Tensor, RuleState]:
        """As `forward`, for a chunk that goes where `update` says in the open segment of each row.

        `local` and what is returned are [B, H, T, D], `values` all of the segment, the chunk's
        among them, [B, H_kv, m, D].
        """
        length, last_query = self.segment_length, state.last_query
        queries, new_keys = self.shifted(q, k, state, update.starts[:, None])
        keys = update.write(state.keys, new_keys)
        new_gates, gates = self.token_gates(x), state.gates
        if new_gates is not None and gates is not None:
            gates = update.write(gates, new_gates)
        out, memory = self.read(queries, local, self.read_weight, state.memory), state.memory
        if (completes := update.completes) is not None:

            def of_segment(x: Tensor) -> Tensor:
                return x[:, :, :length].unsqueeze(1)

            def chosen(states: Tensor, old: Tensor) -> Tensor:
                return torch.where(completes.view(-1, *[1] * (old.dim() - 1)), states[:, 1], old)

            new_gates = None if gates is None else of_segment(gates)
            states = self.states(of_segment(keys), of_segment(values), new_gates, memory, None)
            memory = states.map(chosen, memory)
        if last_query is not None:
            last_query = update.newest(q, last_query)
        return out, RuleState(memory, keys, gates, update.newest(k, state.last_key), last_query)

    @classmethod
    def empty(cls, keys: Tensor) -> Memory:
        """A memory of zeros, for such keys [B, H_kv, T, D]."""
        rows, heads, _, width = keys.shape
        shape = (rows, heads, cls.features * width, width)
        kv = keys.new_zeros(shape, dtype=memory_dtype(keys.dtype))
        return Memory(kv, torch.zeros_like(kv[..., 0]) if cls.is_normalised else None)

    def empty_state(self, rows: int, config: ModelConfig, like: Tensor) -> RuleState:
        """The state before the first token, with the dtype and device of `like`."""
        heads, width = config.key_value_heads, config.head_dim
        keys = like.new_zeros(rows, heads, 0, width)
        memory = self.empty(keys)
        gates = memory.kv.new_zeros(*keys.shape[:-1], 2) if self.is_gated else None
        last_query = None
        if self.memory_query_shift is not None:
            last_query = like.new_zeros(rows, config.num_attention_heads, width)
        return RuleState(memory, keys, gates, keys.new_zeros(rows, heads, width), last_query)

    @classmethod
    def states(
        cls,
        keys: Tensor,
        values: Tensor,
        gates: Tensor | None,
        first: Memory,
        starts: Tensor | None,
    ) -> Memory:
        """The memory before each of N segments and after the last, [B, N + 1, ...].

        Args:
            keys: Keys of N segments, [B, N, H_kv, L, D].
            values: Values, of the same shape.
            gates: What `token_gates` returns, by segment, [B, N, H_kv, L, 2].
            first: The memory before segment 0.
            starts: [B, N + 1] bool, true where the memory is emptied before it is read; None is
                never.
        """
        raise NotImplementedError

    @staticmethod
    def read(q: Tensor, local: Tensor, read_weight: Tensor, memory: Memory) -> Tensor:
        """The local attention with what the memory adds to it; exactly `local` where that is empty.

        `q` are queries without rotary embedding, [N, H, L, D]; `local` and the result are of their
        shape and dtype. The memory is of N rows: query head h reads key-value head h // (H / H_kv).
        """
        raise NotImplementedError

    @classmethod
    def over_segments(
        cls,
        q: Tensor,
        local: Tensor,
        read_weight: Tensor,
        keys: Tensor,
        values: Tensor,
        gates: Tensor | None,
        first: Memory,
        starts: Tensor | None,
        *,
        full: int,
    ) -> tuple[Tensor, Memory]:
        """Read the memory before every segment, and write the first `full`, S or S − 1, to it.

        Shapes are those of `forward`; `first` is the memory before segment 0. The one returned is
        after the last segment that is written (emptied, if another follows that starts a document).
        """
        rows = len(keys)
        if starts is not None:
            # One column per segment that reads, and one for the memory returned. A last segment
            # that is not written reads the memory that is returned, so they share a column.
            starts = functional.pad(starts, (0, full + 1 - starts.size(1)))
        length = local.size(3)

        def cut(x: Tensor) -> Tensor:
            return segmented(x, length)[:, :full]

        by_segment = None if gates is None else cut(gates)
        states = cls.states(cut(keys), cut(values), by_segment, first, starts)
        before = states.map(lambda x: x[:, : local.size(1)].flatten(0, 1))
        reading, near = (_by_memory(x, rows) for x in (segmented(q, length), local))
        out = cls.read(reading, near, read_weight, before)
        return _by_stream(out, rows, local), states.map(lambda x: x[:, -1])


def _with_previous(
    x: Tensor, share: Tensor | None, previous: Tensor | None, starts: Tensor | None
) -> Tensor:
    """lerp(x_t, x_{t−1}, μ) of keys or queries [B, H, T, D].

    `share` is μ, [H]; None shifts nothing. `previous` is that of the token before the first, [B, H,
    D], if there is one. A document's first token, where `starts` [B, T] is true, keeps its own.
    """
    if share is None:
        return x
    shares = share.to(x.dtype)[:, None].expand(x.shape[:3])
    if starts is not None:
        shares = shares.masked_fill(starts[:, None], 0.0)
    if previous is None:
        return shifted_keys(x, functional.pad(shares[:, :, 1:], (1, 0)))
    x = torch.cat((previous.unsqueeze(2).to(x.dtype), x), dim=2)
    return shifted_keys(x, functional.pad(shares, (1, 0)))[:, :, 1:]


def _streams_with_previous(
    x: Tensor, share: Tensor | None, starts: Tensor | None, rows: int, segment_length: int
) -> Tensor:
    """`_with_previous` for n streams of the same documents: rows i, B + i, 2B + i, … are of one.

    What precedes a segment is always the first stream's token: the segments of the other streams
    know nothing of each other. `x` is [n · B, H, T, D], `rows` is B, and T is a multiple of
    `segment_length`.
    """
    if share is None:
        return x
    streams, first = len(x) // rows, torch.arange(x.size(2), device=x.device) == 0
    starts = first.expand(rows, -1) if starts is None else starts | first
    segments = x.view(*x.shape[:2], -1, segment_length, x.size(3)).transpose(1, 2)
    last = segments[:rows, :, :, -1]
    out = _with_previous(
        segments.flatten(0, 1),
        share,
        last.roll(1, dims=1).flatten(0, 1).repeat(streams, 1, 1),
        starts.reshape(-1, segment_length).repeat(streams, 1),
    )
    return out.view_as(segments).transpose(1, 2).flatten(2, 3)


def _by_memory(x: Tensor, rows: int) -> Tensor:
    """[n · rows, S, H, L, D] as [rows · S, H, n · L, D]: all streams beside the memory they read.

    Otherwise each stream would need its own copy of the memories.
    """
    streams = x.reshape(-1, rows, *x.shape[1:])
    return streams.permute(1, 2, 3, 0, 4, 5).flatten(3, 4).flatten(0, 1)


def _by_stream(out: Tensor, rows: int, segments: Tensor) -> Tensor:
    """The inverse of `_by_memory`, in the shape of `segments` [n · rows, S, H, L, D]."""
    _, count, heads, length, width = segments.shape
    out = out.view(rows, count, heads, -1, length, width)
    return out.permute(3, 0, 1, 2, 4, 5).flatten(0, 1)
