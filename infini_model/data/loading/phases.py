"""Windows that grow during a training, `packing.context_schedule`: short first, long at the end.

A memory learns sooner from short windows, and to keep what it holds from long ones. A phase has
windows of one length, as many more of them in a batch as they are shorter, and an order of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from infini_model.config import PackingConfig
from infini_model.data.loading.packing import pack
from infini_model.data.loading.windows import Windows


@dataclass(frozen=True)
class Phase:
    """Windows of one length.

    Attributes:
        windows: The windows.
        first: Where it begins, in windows of `packing.context_length` consumed before.
        parts: How many of its windows have the tokens of one of these.
        first_key: The key of its first window, `Batch.keys`; those before it have smaller ones.
    """

    windows: Windows
    first: int = 0
    parts: int = 1
    first_key: int = 0


def make_phases(
    windows: Windows,
    config: PackingConfig,
    segment_length: int,
    *,
    total_steps: int,
    global_batch: int,
) -> Sequence[Phase]:
    """The phases of a training of `total_steps` steps, each of `global_batch` of `windows`.

    `windows` are those of `config`; the phases before the last cut the same tokens shorter.
    """
    phases: list[Phase] = []
    for fraction, segments in (config.context_schedule or {}).items():
        length = segments * segment_length
        first, key = math.ceil(fraction * total_steps) * global_batch, 0
        if phases:
            before = phases[-1]
            key = before.first_key + (first - before.first) * before.parts
        shorter = config.updated(context_length=length)
        cut = replace(windows, packing=pack(windows.stream, shorter, segment_length))
        phases.append(Phase(cut, first, config.context_length // length, key))
    return phases or [Phase(windows)]
