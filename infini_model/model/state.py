"""What a model carries from one chunk of a sequence to the next: constant in size."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from infini_model.config import ModelConfig
from infini_model.model.memory import Memory


class LayerState(NamedTuple):
    """The memory of one layer, and its cache of the open segment: the one that is not full yet.

    Attributes:
        memory: Memory of all full segments.
        keys: Rotated keys of the open segment, [B, H_kv, n, D]. n is at most segment_length + 1,
            where the last slot takes padding; slots after a row's last token are masked.
        values: Its values, of the same shape.
        memory_keys: The keys under which these values will be written, of the same shape.
        memory_gates: β and g of each token, [B, H_kv, n, 2]; None in a model without them.
        last_key: Key of the last token before the key shift, [B, H_kv, D].
        last_query: Its query before the query shift, [B, H, D]; None in a model without that shift.
    """

    memory: Memory
    keys: Tensor
    values: Tensor
    memory_keys: Tensor
    memory_gates: Tensor | None
    last_key: Tensor
    last_query: Tensor | None


class State(NamedTuple):
    """What the model carries from one chunk of a sequence to the next.

    Attributes:
        layers: One `LayerState` per layer.
        position: Number of tokens that each row has seen, [B] int64, on the CPU.
    """

    layers: tuple[LayerState, ...]
    position: Tensor

    def repeat(self, times: int) -> State:
        """A state with each row repeated so many times, one after the other."""
        repeated: State = tree_map_only(Tensor, lambda x: x.repeat_interleave(times, dim=0), self)
        return repeated


class CacheUpdate(NamedTuple):
    """Where the tokens of a chunk go in each row's cache of the open segment.

    Attributes:
        slots: Cache slot of each token, [B, T]; segment_length for padding.
        mask: True where a token attends to a slot, [B, 1, T, n], n being the slots in use.
        completes: Rows whose segment is full after the chunk, [B] bool; None if there are none.
        last: Index of each row's last token in the chunk, [B]; -1 for a row without tokens.
        starts: Rows that have seen no token before the chunk, [B] bool.
        in_place: Whether to write to the buffers of the previous state, which becomes invalid.
    """

    slots: Tensor
    mask: Tensor
    completes: Tensor | None
    last: Tensor
    starts: Tensor
    in_place: bool

    @classmethod
    def plan(
        cls,
        position: Tensor,
        counts: Tensor,
        width: int,
        segment_length: int,
        device: torch.device,
        *,
        in_place: bool,
    ) -> CacheUpdate:
        """The update for a chunk of `width` tokens, whose first `counts` [B] of each row are real.

        `position` is that of `State`; it and `counts` are on the CPU, the result on `device`.

        Raises:
            ValueError: A row has more tokens than its segment has room for.
        """
        filled = position % segment_length
        end = filled + counts
        if int(end.max()) > segment_length:
            beyond = int(end.max()) - segment_length
            raise ValueError(f"input_ids: {beyond} tokens beyond the segment")
        index = torch.arange(width, device=counts.device)
        real = index < counts[:, None]
        slots = torch.where(real, filled[:, None] + index, segment_length)
        used = torch.arange(max(1, int(end.max())), device=counts.device)
        completes = end == segment_length
        return cls(
            slots=slots.to(device),
            mask=(used <= slots[:, None, :, None]).to(device),
            completes=completes.to(device) if bool(completes.any()) else None,
            last=(counts - 1).to(device),
            starts=(position == 0).to(device),
            in_place=in_place,
        )

    def newest(self, new: Tensor, previous: Tensor) -> Tensor:
        """Each row's last real token of `new` [B, H, T, D], or `previous` [B, H, D] without one."""
        index = self.last.clamp(min=0)[:, None, None, None]
        last = new.gather(2, index.expand(-1, new.size(1), 1, new.size(3))).squeeze(2)
        return torch.where(self.last[:, None, None] < 0, previous, last)

    def write(self, cache: Tensor, new: Tensor, segment_length: int) -> Tensor:
        """`cache` [B, H_kv, n, D] with `new` [B, H_kv, T, D] in its slots.

        The result has segment_length + 1 slots.
        """
        missing = segment_length + 1 - cache.size(2)
        if missing:
            cache = functional.pad(cache, (0, 0, 0, missing))
        elif not self.in_place:
            cache = cache.clone()
        slots = self.slots[:, None, :, None].expand_as(new)
        return cache.scatter_(2, slots, new.to(cache.dtype))


def empty_memory(config: ModelConfig, like: Tensor) -> Memory:
    """An empty memory with the rows, dtype and device of `like` [B, ...]."""
    return Memory.empty(
        "linear" if config.memory == "none" else config.memory,
        like.size(0),
        config.key_value_heads,
        config.head_dim,
        dtype=like.dtype,
        device=like.device,
    )
