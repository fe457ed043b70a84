"""What a model carries from one chunk of a sequence to the next: constant in size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from infini_model.model.memory import RuleState

# Dimensions of a tensor that has a slot for each token of the open segment, the third of them.
SLOTTED = 4


class LayerState(NamedTuple):
    """The state of one layer: the keys and values in sight of its window, and its memory.

    Attributes:
        keys: Rotated keys, [B, H_kv, k + n · L + m, D]: the sinks and the n earlier segments of
            `Window`, then the open segment, the one that is not full yet. m grows with its tokens
            to at most segment_length + 1; slots after a row's last token are masked.
        values: Their values, of the same shape.
        rule: The state of the memory; None in a model without.
    """

    keys: Tensor
    values: Tensor
    rule: RuleState | None


class State(NamedTuple):
    """What the model carries from one chunk of a sequence to the next.

    Attributes:
        layers: One `LayerState` per layer.
        position: Number of tokens that each row has seen of its document, [B] int64, on the CPU.
    """

    layers: tuple[LayerState, ...]
    position: Tensor

    def repeat(self, times: int) -> State:
        """A state with each row repeated so many times, one after the other."""
        repeated: State = tree_map_only(Tensor, lambda x: x.repeat_interleave(times, dim=0), self)
        return repeated

    def rows(self, index: Sequence[int]) -> State:
        """Copy some rows."""
        chosen: State = tree_map_only(Tensor, lambda x: x[list(index)], self)
        return chosen

    def to(self, device: torch.device) -> State:
        """Move all but the positions to a device."""
        layers = tree_map_only(Tensor, lambda x: x.to(device), self.layers)
        return State(layers, self.position)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(x.nbytes for x in tree_leaves(self) if isinstance(x, Tensor))

    @staticmethod
    def joined(states: Sequence[State]) -> State:
        """Copy the rows of all `states` into one; open segments get the slots of the longest."""

        def join(*parts: Tensor | None) -> Tensor | None:
            tensors = [part for part in parts if part is not None]
            if not tensors:
                return None
            if tensors[0].dim() == SLOTTED:
                slots = max(part.size(2) for part in tensors)
                tensors = [pad(part, (0, 0, 0, slots - part.size(2))) for part in tensors]
            return torch.cat(tensors)

        whole: State = tree_map(join, *states)
        return whole
