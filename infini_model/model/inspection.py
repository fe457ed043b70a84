"""What measurements of a memory mean, each in a line with its remedy.

To knock a memory out, with the same weights, is to read nothing from it. That shows what the
weights rely on, not what a memory is worth: for that a model has to be trained without one.
"""

from __future__ import annotations

from collections.abc import Sequence

# A read weight whose strength changed less has not learned.
UNMOVED = 0.001
# Decimal places with which gains are shown, in nats per token.
PLACES = 4


def effect(gain: float, low: float, high: float) -> float:
    """What a memory takes off the loss, negative if it hurts; 0 if it has no effect to speak of.

    `low` and `high` are the interval of 95% of `gain`. What is decided is what is shown: there is
    no effect if the gain rounds to 0, or if the rounded interval holds 0.
    """
    shown = round(gain, PLACES)
    return 0.0 if round(low, PLACES) <= 0.0 <= round(high, PLACES) else shown


def hurts(gain: float, error: float) -> str | None:
    """Of a memory that lowers the loss by `gain` nats, with its standard error."""
    found = effect(gain, gain - 2.0 * error, gain + 2.0 * error)
    if found >= 0.0:
        return None
    return (
        f"The memory hurts: with the same weights the loss is {-found:.{PLACES}f} lower without "
        "it. Train longer, or without it: model.memory=none."
    )


def unmoved(changes: Sequence[float], steps: int) -> str | None:
    """Of read weights whose strengths changed so much in `steps` steps."""
    if any(abs(change) >= UNMOVED for change in changes):
        return None
    return (
        f"All read weights are still where they started after {steps:,} steps. Raise "
        "training.memory_learning_rate."
    )
