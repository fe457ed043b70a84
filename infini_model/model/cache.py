"""The cached form of a pass: the slots of a chunk that crosses no segment border."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from infini_model.model.window import Window

# By so many slots a cache grows: each time it is copied.
SLOTS = 128


class CacheUpdate(NamedTuple):
    """The slots of a chunk's tokens in each row's caches of the open segment.

    Attributes:
        slots: Slot of each token, [B, T], which is its place in the segment; that of padding
            follows those in use.
        room: How many slots the caches of the open segment need, at most L + 1.
        mask: True where a token sees a slot of the window's cache, [B, 1, T, k + n · L + m], m
            being the slots in use.
        completes: Rows whose segment is full after the chunk, [B] bool; None if there are none.
        last: Index of each row's last token in the chunk, [B]; -1 for a row without tokens.
        starts: Rows that have seen no token before the chunk, [B] bool.
        is_first: Rows whose open segment is the first of its document, [B] bool.
        in_place: Whether to write to the buffers of the previous state, which becomes invalid.
    """

    slots: Tensor
    room: int
    mask: Tensor
    completes: Tensor | None
    last: Tensor
    starts: Tensor
    is_first: Tensor
    in_place: bool

    @classmethod
    def plan(
        cls, position: Tensor, counts: Tensor, chunk: Tensor, window: Window, *, in_place: bool
    ) -> CacheUpdate:
        """The update for a chunk of tokens [B, T], whose first `counts` [B] of each row are real.

        `position` is that of `State`; it and `counts` are on the CPU, the result where `chunk` is.
        Raises `ValueError` if a row has more tokens than its segment has room for.
        """
        length, width, device = window.segment_length, chunk.size(1), chunk.device
        filled = position % length
        end = filled + counts
        most = int(end.max())
        if most > length:
            raise ValueError(f"input_ids: {most - length} tokens beyond the segment")
        index = torch.arange(width, device=counts.device)
        real = index < counts[:, None]
        slots = torch.where(real, filled[:, None] + index, most)
        used = torch.arange(max(1, most), device=counts.device)
        older = window.older(position // length)[:, None].expand(-1, width, -1)
        mask = torch.cat((older, used <= slots[:, :, None]), 2).unsqueeze(1)
        completes = end == length
        return cls(
            slots=slots.to(device),
            room=min(length + 1, (most // SLOTS + 1) * SLOTS),
            mask=mask.to(device),
            completes=completes.to(device) if bool(completes.any()) else None,
            last=(counts - 1).to(device),
            starts=(position == 0).to(device),
            is_first=(position < length).to(device),
            in_place=in_place,
        )

    def newest(self, new: Tensor, previous: Tensor) -> Tensor:
        """Each row's last real token of `new` [B, H, T, D], or `previous` [B, H, D] without one."""
        index = self.last.clamp(min=0)[:, None, None, None]
        last = new.gather(2, index.expand(-1, new.size(1), 1, new.size(3))).squeeze(2)
        return torch.where(self.last[:, None, None] < 0, previous.to(new.dtype), last)

    def write(self, cache: Tensor, new: Tensor, before: int = 0) -> Tensor:
        """`cache` [B, H_kv, before + m, D] with `new` [B, H_kv, T, D] in the slots of its tokens.

        `before` slots precede those of the open segment, of which the result has `room` or more.
        """
        missing = before + self.room - cache.size(2)
        if missing > 0:
            cache = functional.pad(cache, (0, 0, 0, missing))
        elif not self.in_place:
            cache = cache.clone()
        slots = (before + self.slots)[:, None, :, None].expand_as(new)
        return cache.scatter_(2, slots, new.to(cache.dtype))
