"""Intervals of 95% for what an evaluation measures on a sample."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

# Of a normal distribution, for an interval of 95%.
QUANTILE = 1.96
RESAMPLES = 2000
DRAWN_AT_ONCE = 10_000_000


class Interval(NamedTuple):
    """An estimate and its interval of 95%, `low` to `high`."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        """`0.0512 (0.0398 to 0.0611)`, without a sign of 0.0000."""
        return f"{self.estimate:z.4f} ({self.low:z.4f} to {self.high:z.4f})"

    @property
    def percent(self) -> str:
        """`97.1% (94.6 to 98.5)`."""
        return f"{100 * self.estimate:.1f}% ({100 * self.low:.1f} to {100 * self.high:.1f})"


def bootstrap(sums: Any, counts: Any) -> list[Interval]:
    """Ratios of sums over documents, Σ sums / Σ counts, with percentile intervals over resamples.

    The documents are the sample: they are drawn with replacement, each with all of its tokens, as
    tokens of one document depend on each other (Efron and Tibshirani, An Introduction to the
    Bootstrap, chapter 13).

    `sums` are [documents, K], `counts` too, or [documents, 1] for all; each column must have a
    positive sum. Of the K intervals those of columns that a single document reaches are infinite.
    """
    sums, counts = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    documents = len(sums)
    estimates = sums.sum(0) / counts.sum(0)
    uniform = np.full(documents, 1.0 / documents)
    generator, ratios = np.random.default_rng(0), np.empty((RESAMPLES, sums.shape[1]))
    with np.errstate(invalid="ignore", divide="ignore"):
        for block in np.array_split(ratios, 1 + RESAMPLES * documents // DRAWN_AT_ONCE):
            drawn = generator.multinomial(documents, uniform, size=len(block))
            # A resample without any document that reaches so far says nothing of that column.
            block[:] = (drawn @ sums) / (drawn @ counts)
    low, high = np.nanpercentile(ratios, [2.5, 97.5], axis=0)
    alone = np.count_nonzero(counts, axis=0) < 2
    low, high = np.where(alone, -np.inf, low), np.where(alone, np.inf, high)
    return [Interval(*map(float, each)) for each in zip(estimates, low, high, strict=True)]


def wilson(successes: float, trials: int) -> Interval:
    """The share of successes, with Wilson's score interval, which holds near 0 and 1 too.

    A trial that succeeds in part counts in part; then the interval is wider than it has to be.

    Raises `ZeroDivisionError` without trials.
    """
    share, square = successes / trials, QUANTILE**2 / trials
    middle = (share + square / 2) / (1 + square)
    half = QUANTILE / (1 + square) * (share * (1 - share) / trials + square / trials / 4) ** 0.5
    # The ends of all failures and of all successes are exact, but for rounding.
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return Interval(share, min(share, low), max(share, high))
