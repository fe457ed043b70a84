"""What measurements of a memory mean, each in a line with its remedy."""

from __future__ import annotations

from collections.abc import Sequence

# A layer of which less of the output comes from the memory does not read it.
SILENT_SHARE = 0.01
# A gate that moved less, before the sigmoid, or a weight of a residual memory has not learned.
UNMOVED = 0.01
# Decimal places with which gains are shown, in nats per token.
PLACES = 4


def effect(gain: float, low: float, high: float) -> float:
    """What a memory takes off the loss, negative if it hurts; 0 if it has no effect to speak of.

    `low` and `high` are the interval of 95% of `gain`. What is decided is what is shown: there is
    no effect if the gain rounds to 0, or if the rounded interval holds 0.
    """
    shown = round(gain, PLACES)
    return 0.0 if round(low, PLACES) <= 0.0 <= round(high, PLACES) else shown


def never_read(shares: Sequence[float], memory: str) -> str | None:
    """Of a model whose layers have these mean shares of the memory in their output."""
    silent = [str(layer) for layer, share in enumerate(shares) if share < SILENT_SHARE]
    if not silent:
        return None
    *first, last = silent
    names = f"Layers {', '.join(first)} and {last}" if first else f"Layer {last}"
    remedy = (
        "Let its weights learn faster (training.gate_learning_rate)."
        if memory == "residual"
        else "Start with more of it (a higher model.gate_start), or let the gates learn faster "
        "(training.gate_learning_rate)."
    )
    return (
        f"{names} of {len(shares)} (counted from 0) never {'read' if first else 'reads'} the "
        f"memory: less than {SILENT_SHARE:.0%} of the output comes from it. {remedy}"
    )


def hurts(gain: float, low: float, high: float, memory: str) -> str | None:
    """Of a memory that lowers the loss by `gain` nats, with its interval of 95%."""
    found = effect(gain, low, high)
    if found >= 0.0:
        return None
    others = {
        "linear": "Start with less of it (a lower model.gate_start), write it by "
        "model.memory=delta, or train longer.",
        "delta": "Start with less of it (a lower model.gate_start), or train longer.",
        "residual": "Train longer.",
    }
    return (
        f"The memory hurts: with the same weights the loss is {-found:.{PLACES}f} lower without "
        f"it. {others[memory]}"
    )


def unmoved(changes: Sequence[float], still: str, steps: int, *, one_segment: bool) -> str | None:
    """Of gates or weights that changed so much in `steps` steps.

    `still` begins the sentence that says where they are, `one_segment` is of the windows.
    """
    if any(abs(change) >= UNMOVED for change in changes):
        return None
    remedy = "Raise training.gate_learning_rate."
    if one_segment:
        remedy = (
            "A window of one segment has no memory to read: make packing.context_length several "
            "times model.segment_length."
        )
    return f"{still} after {steps:,} steps. {remedy}"
