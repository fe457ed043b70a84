"""The share of a training's computation that is learned from: the fill of its windows.

Padding costs as much as text. And a memory is read only by the segments after a document's first:
where documents are hardly longer than a segment, most segments start with an empty one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from infini_model.data.loading.loader import Phase
from infini_model.data.loading.windows import SAMPLE_SEED, sample_windows

# Windows that are looked at: enough for 3%, of a shard each at worst.
SAMPLE = 1024
LEAST_FILLED, LEAST_RECALLED = 0.6, 0.25


@dataclass(frozen=True)
class Coverage:
    """The shares of windows that are learned from.

    Attributes:
        filled: Share of the positions that predict a token of a document; the rest is padding.
        recalled: Share of the segments with such positions that read a memory of earlier ones.
    """

    filled: float
    recalled: float

    def describe(self, memory: str) -> Iterator[str]:
        """Yield a line for each share. `memory` is `model.memory`."""
        yield f"Positions with a target, not padding: {self.filled:.0%}"
        if memory != "none":
            yield f"Segments that read a memory: {self.recalled:.0%}"

    def warnings(self, mode: str, memory: str) -> Iterator[str]:
        """Yield a line for windows that are mostly padding, or hardly teach the memory.

        `mode` is `packing.mode`, `memory` is `model.memory`.
        """
        smaller = "packing.context_length" if mode == "document" else "model.segment_length"
        if self.filled < LEAST_FILLED:
            yield (
                f"only {self.filled:.0%} of the positions have a target, the rest is padding: "
                f"lower {smaller}, or set packing.remainder=share or packing.mode=packed"
            )
        if memory != "none" and self.recalled < LEAST_RECALLED:
            yield (
                f"only {self.recalled:.0%} of the segments read a memory, and only from them does "
                "it learn: lower model.segment_length, raise packing.context_length, or set "
                "packing.mode=packed"
            )


def measure_coverage(phase: Phase, segment_length: int) -> Coverage:
    """The coverage of a phase, from windows that it has; reads where documents start, no tokens.

    There must be a window. Raises `DataError` if a shard is missing or damaged.
    """
    windows, packing = phase.windows, phase.windows.packing
    positions = sample_windows(len(windows), SAMPLE)
    rows = packing.locate(np.sort(phase.mixture.windows_at(positions, SAMPLE_SEED, 0)))
    with_target = -(-rows.valid // segment_length)
    # A window begins with an empty memory.
    starts = np.arange(len(with_target)) % packing.rows_per_window == 0
    if windows.aligned:
        starts |= rows.first
    return Coverage(
        filled=float(rows.valid.mean()) / packing.row_length,
        recalled=1 - float(starts.sum() / with_target.sum()),
    )
