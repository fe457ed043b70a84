"""Sentences on the memory: whether the weights use it, and what to do about it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from infini_model.evaluation.statistics import Interval
from infini_model.evaluation.subject import Subject
from infini_model.model.inspection.findings import effect

# Windows of fewer segments teach the memory little about distance.
FEW_SEGMENTS = 8


def verdict(gains: Mapping[int, Interval], where: str) -> str:
    """Whether the weights use the memory: `gains` by the segment from which on they count."""
    (start, near), *rest = gains.items()
    gained = effect(*near)
    if gained > 0:
        found = "**The memory is used.** Knocking it out raises the loss by"
    elif gained < 0:
        found = "**The memory hurts.** The loss with it is higher than with it knocked out, by"
        rest, near = [], Interval(-near.estimate, -near.high, -near.low)
    else:
        found = "**The memory is not used**, as the interval includes 0: it lowers the loss by"
    further = "".join(f", and from the {_ordinal(first)} on {gain}" for first, gain in rest)
    return f"{found} {near} nats per token from the {_ordinal(start)} segment on{further}, {where}."


def _ordinal(number: int) -> str:
    return {2: "2nd", 3: "3rd"}.get(number, f"{number}th")


def advice(subject: Subject, *, is_used: bool) -> list[str]:
    """How to make the memory learn if it is not used, and how to find out what it is worth."""
    config, segment_length = subject.config, subject.model.config.segment_length
    found = []
    if not is_used:
        steps = ["documents of many segments"]
        if config.packing.mode != "aligned":
            steps.append("`packing.mode=aligned`, which empties the memory at each of them")
        if config.packing.context_length // segment_length < FEW_SEGMENTS:
            steps.append(
                "windows of more segments, by a larger `packing.context_length` or a smaller "
                "`model.segment_length`"
            )
        if not subject.model.config.memory_key_shift:
            steps.append("`model.memory_key_shift=true`")
        if subject.model.config.memory != "residual":
            steps.append(
                "gates that learn (`training.gate_learning_rate`) from `model.gate_start=-2`"
            )
        steps.append("more steps")
        found.append(f"What makes a memory learn, see docs/memory.md: {'; '.join(steps)}.")
    if config.training.objective == "causal":
        found.append(
            "Knocking the memory out shows what these weights rely on, not what a memory is worth: "
            "for that, compare with a control that is trained without one on the same tokens, "
            f"{_control(subject)}."
        )
    return found


def _control(subject: Subject) -> str:
    """The commands that train the same model without a memory, and compare the two."""
    file = shlex.quote(str(subject.run_dir / "config.yaml"))
    name = subject.run_dir.name
    ours, control = shlex.quote(name), shlex.quote(f"{name}-no-memory")
    return (
        f"`infini run --config {file} model.memory=none run.name={control}`, then "
        f"`infini compare {control} {ours}`"
    )
