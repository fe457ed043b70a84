"""Mixtures: the source of each position of the endless training order, and its window there.

Every source has an order of its own, endless too: epoch after epoch, each a permutation of its
windows. A mixture interleaves them by shares. Which source a position is of, and how many positions
before it are, follows from its number alone, as in grain (`mix.py` of google/grain): so a mixture
has no state, and any number of processes sees the same one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from infini_model.data.loading.windows import Windows, permute
from infini_model.runtime.errors import ConfigError, DataError

# Products of two numbers up to this one, and twice those, are exact in 64 bits.
MOST_SHARES = 1 << 30
# Of the numbers that key a permutation: a training has fewer phases, and a phase fewer epochs.
PHASE, SOURCE = 1 << 32, 1 << 48


@dataclass(frozen=True)
class Mixture:
    """Sources by their shares of the positions.

    Attributes:
        starts: The windows before those of each source, and all, [sources + 1].
        shares: Whole numbers, [sources]: of each sum of them, so many positions are the source's.
        taken: Positions of each source that were read before the first one, [sources]; empty is 0.
    """

    starts: Sequence[int]
    shares: Sequence[int]
    taken: Sequence[int] = ()

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each position, and how many positions before it are of that source.

        Both int64 of the shape of `positions`, [N] int64.
        """
        sources, before = np.zeros_like(positions), positions.copy()
        undecided = np.arange(len(positions))
        for source, share, total in self._divisions():
            place = before[undecided]
            others = _others(place, share, total)
            is_own = _others(place + 1, share, total) == others
            before[undecided] = np.where(is_own, place - others, others)
            sources[undecided[is_own]] = source
            undecided = undecided[~is_own]
        return sources, before

    def windows_at(self, positions: np.ndarray, seed: int, phase: int) -> np.ndarray:
        """The window at each position [N] of a phase, its number in the split: int64 [N]."""
        sources, before = self.locate(positions)
        windows = np.empty_like(positions)
        for source in np.unique(sources).tolist():
            here = np.flatnonzero(sources == source)
            count = self.starts[source + 1] - self.starts[source]
            taken = self.taken[source] if self.taken else 0
            epochs, places = np.divmod(before[here] + taken, count)
            keys = source * SOURCE + phase * PHASE + epochs
            windows[here] = self.starts[source] + permute(places, count, seed, keys)
        return windows

    def read_in(self, positions: int) -> list[int]:
        """Count the positions of each source among the first `positions` and those taken before."""
        read, left = list(self.taken) or [0] * len(self.shares), np.array([positions])
        for source, share, total in self._divisions():
            others = _others(left, share, total)
            read[source] += int((left - others)[0])
            left = others
        return read

    def _divisions(self) -> Iterator[tuple[int, int, int]]:
        """Yield each source that has a share, with that and the sum of those not yet divided.

        The largest is first, which keeps what rounding adds up to below two windows.
        """
        left = sum(self.shares)
        for source in sorted(range(len(self.shares)), key=lambda each: -self.shares[each]):
            if share := self.shares[source]:
                yield source, share, left
                left -= share


def _others(positions: np.ndarray, share: int, total: int) -> np.ndarray:
    """Count the first `positions` that are not of a source with `share` of `total`: rounded."""
    periods, rest = np.divmod(positions, total)
    within = (2 * rest * (total - share) + total) // (2 * total)
    others: np.ndarray = periods * (total - share) + within
    return others


def mix(windows: Windows, weights: Mapping[str, float] | None) -> Mixture:
    """The mixture of the sources of a split; without weights, of all windows once an epoch.

    Raises `ConfigError` if the weights are not those of the sources, or all are 0; `DataError` if
    a source with a weight has no window.
    """
    sources, starts = windows.sources, windows.packing.window_starts
    if weights is None:
        return Mixture(starts, _whole([Fraction(len(each)) for each in sources.values()]))
    if weights.keys() != sources.keys():
        known = ", ".join(filter(None, sources)) or "one without a name"
        weighed = ", ".join(weights)
        raise ConfigError(
            f"packing.weights: weighs {weighed}, but the sources of {windows.name} are {known}"
        )
    if not any(weights.values()):
        raise ConfigError("packing.weights: all are 0")
    for name, part in sources.items():
        if weights[name] and not len(part):
            raise DataError(
                f"packing.weights.{name}: {windows.name} has no window of this source, which has "
                "fewer tokens than packing.context_length"
            )
    # As they are written: 0.7 and 0.3 are 7 and 3.
    return Mixture(starts, _whole([Fraction(str(weights[name])) for name in sources]))


def _whole(shares: Sequence[Fraction]) -> list[int]:
    """Whole numbers with the same ratios, as far as they fit; none that is not 0 becomes 0."""
    factor = Fraction(math.lcm(*(share.denominator for share in shares)))
    if sum(shares) * factor > MOST_SHARES:
        factor = Fraction(MOST_SHARES) / sum(shares, Fraction())
    return [math.ceil(share * factor) for share in shares]
