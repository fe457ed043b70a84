"""What a model carries from one chunk of a sequence to the next: constant in size."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_map_only

from infini_model.model.memory import RuleState


class LayerState(NamedTuple):
    """The state of one layer: the keys and values in sight of its window, and its memory.

    Attributes:
        keys: Rotated keys, [B, H_kv, k + n · L + m, D]: the sinks and the n earlier segments of
            `Window`, then the open segment, the one that is not full yet. m is at most
            segment_length + 1, where the last slot takes padding; slots after a row's last token
            are masked.
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
