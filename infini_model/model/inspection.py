"""The meaning of the measured gain of a memory.

To knock a memory out, with the same weights, is to read nothing from it. That shows what the
weights rely on, not what a memory is worth: for that a model has to be trained without one.
"""

# Decimal places with which gains are shown, in nats per token.
PLACES = 4


def effect(gain: float, low: float, high: float) -> float:
    """What a memory takes off the loss, negative if it hurts; 0 if it has no effect to speak of.

    `low` and `high` are the interval of 95% of `gain`. What is decided is what is shown: there is
    no effect if the gain rounds to 0, or if the rounded interval holds 0.
    """
    shown = round(gain, PLACES)
    return 0.0 if round(low, PLACES) <= 0.0 <= round(high, PLACES) else shown
