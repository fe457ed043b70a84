"""Which layers and heads read the memory, and what the model loses without them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from infini_model.data.loading.windows import Batch
from infini_model.data.manifest import Split
from infini_model.evaluation.reporting.markdown import table
from infini_model.evaluation.reporting.plots import plot_heads
from infini_model.evaluation.statistics import Interval, bootstrap
from infini_model.evaluation.subject import HELD_OUT, Subject
from infini_model.evaluation.tasks.task import EvaluationTask, Picture, TaskResult
from infini_model.model.inspection import findings
from infini_model.model.inspection.knock_out import knocked_out
from infini_model.model.inspection.memory_use import MemoryUse


class Part(NamedTuple):
    """What is knocked out: a head, a layer, or with None for both the whole memory."""

    layer: int | None = None
    head: int | None = None

    @property
    def name(self) -> str:
        """Of its cell."""
        numbers = [f"layer-{self.layer}"] if self.layer is not None else ["all"]
        return "-".join([*numbers, *([f"head-{self.head}"] if self.head is not None else [])])


class Measured(NamedTuple):
    """What is known of a model's memory.

    Attributes:
        windows: Number of windows.
        memory: `model.memory`.
        gates: sigmoid(gate), [layers, H]; of a residual memory the root mean square of its weight.
        shares: Mean share of the memory in the output, [layers, H].
        gains: How much the loss rises without a part of the memory, in nats per token.
    """

    windows: int
    memory: str
    gates: Tensor
    shares: Tensor
    gains: dict[Part, Interval]


class Task(EvaluationTask):
    """Gates, shares of the output, and losses with one part of the memory knocked out."""

    title = "Layers and heads that read the memory"

    def sequences(self, subject: Subject) -> int:
        """All passes: one with the memory, and one for each part that is knocked out."""
        if _refusal(subject) is not None:
            return 0
        shape = subject.model.config
        parts = 1 + shape.num_hidden_layers + _heads_to_try(subject)
        return (1 + parts) * _windows(subject)

    def run(self, subject: Subject) -> TaskResult:
        """Score a sample of the windows of a split again and again."""
        refusal = _refusal(subject)
        if refusal is not None:
            return TaskResult(section=refusal)
        measured = _measure(subject)
        if measured is None:
            return TaskResult(section="No window has a second segment that could read the memory.")
        gain, shares = measured.gains[Part()], measured.shares.mean(1).tolist()
        advice = [
            findings.never_read(shares, measured.memory),
            findings.hurts(*gain, measured.memory),
        ]
        metrics, intervals = {}, {}
        for layer, share in enumerate(shares):
            metrics[f"evaluation/heads/layer_{layer}/share"] = share
        for part, found in measured.gains.items():
            if part.head is None:
                layer_name = "" if part.layer is None else f"/layer_{part.layer}"
                metrics[f"evaluation/heads{layer_name}/gain"] = found.estimate
                if measured.windows > 1:  # one says nothing of another
                    intervals[f"evaluation/heads{layer_name}/gain"] = (found.low, found.high)
        path = plot_heads(_panels(measured), subject.plots_dir / "heads.png")
        caption = "Gate, share of the output and loss without it, by layer and head"
        return TaskResult(
            metrics=metrics,
            intervals=intervals,
            section=_section(measured),
            summary=[_summary(measured)],
            advice=[each for each in advice if each is not None],
            pictures=[Picture(path=path, caption=caption)],
            details={
                "windows": measured.windows,
                "gates": measured.gates.tolist(),
                "shares": measured.shares.tolist(),
                "gains": {
                    part.name: list(found if measured.windows > 1 else found[:1])
                    for part, found in measured.gains.items()
                },
            },
        )


def _refusal(subject: Subject) -> str | None:
    """Why there is nothing to measure; None if there is."""
    if subject.model.config.memory == "none":
        return "The model has no memory (`model.memory` is `none`), so no head reads one."
    if subject.config.packing.context_length <= subject.model.config.segment_length:
        return "The window has only one segment, so no head reads the memory."
    if _split(subject) is None:
        return "There are no windows to score."
    return None


def _split(subject: Subject) -> Split | None:
    return next((split for split in HELD_OUT if subject.sample_size(split)), None)


def _windows(subject: Subject) -> int:
    split = _split(subject)
    sample = 0 if split is None else subject.sample_size(split)
    return min(subject.config.evaluation.heads.max_windows, sample)


def _heads_to_try(subject: Subject) -> int:
    shape, most = subject.model.config, subject.config.evaluation.heads.max_heads
    heads = shape.num_hidden_layers * shape.num_attention_heads
    return heads if most is None else min(most, heads)


def _measure(subject: Subject) -> Measured | None:
    """Score the windows with the memory, then without each part; None if none reads it.

    Each pass is a cell, so an interrupted evaluation continues after the last complete one.
    """
    windows = _windows(subject)
    settings = subject.config.evaluation.heads.updated(max_windows=windows)
    cells = subject.cells("heads", settings)
    read = cells.measured("with-memory", partial(_read, subject))
    subject.on_windows(windows)
    if not read["positions"]:
        return None
    shares = torch.tensor(read["shares"], dtype=torch.float64) / read["positions"]
    gates = torch.stack([each.read_strength() for each in subject.model.attentions])
    parts = [Part(), *map(Part, range(len(gates))), *_largest(shares, _heads_to_try(subject))]
    without = []
    for part in parts:
        without.append(cells.measured(part.name, partial(_sums, subject, part)))
        subject.on_windows(windows)
    rises = np.array(without) - np.array(read["sums"])  # of the same windows: paired
    counts = np.array(read["counts"])[:, None]
    found = bootstrap(rises.T, counts, seed=subject.config.run.seed)
    return Measured(
        windows,
        subject.model.config.memory,
        gates.cpu(),
        shares,
        dict(zip(parts, found, strict=True)),
    )


def _largest(shares: Tensor, count: int) -> Iterator[Part]:
    """The `count` heads with the largest shares, by layer and head."""
    heads = shares.size(1)
    chosen = shares.flatten().argsort(descending=True, stable=True)[:count]
    return (Part(*divmod(number, heads)) for number in sorted(chosen.tolist()))


def _read(subject: Subject) -> dict[str, list[float] | list[list[float]] | float]:
    """Losses and counts by window, and shares, with the memory."""
    sums, counts = list[float](), list[float]()
    use: MemoryUse | None = None
    for batch in _batches(subject):
        losses, targets, used = subject.losses_and_use(batch)
        sums += losses.sum(1).tolist()
        counts += targets.sum(1).tolist()
        use = used if use is None else use + used
    positions = 0.0 if use is None else float(use.positions)
    shares = [] if use is None else use.shares.tolist()
    return {"sums": sums, "counts": counts, "shares": shares, "positions": positions}


def _sums(subject: Subject, part: Part) -> list[float]:
    """The loss of each window without this part of the memory."""
    with knocked_out(subject.model, *part):
        return [
            loss for batch in _batches(subject) for loss in subject.losses(batch)[0].sum(1).tolist()
        ]


def _batches(subject: Subject) -> Iterator[Batch]:
    split = _split(subject)
    return iter(()) if split is None else subject.batches(split, _windows(subject))


def _panels(measured: Measured) -> dict[str, Tensor]:
    """What the picture shows, [layers, H] each; NaN where nothing was measured."""
    gains = torch.full_like(measured.shares, torch.nan)
    for part, found in measured.gains.items():
        if part.layer is not None and part.head is not None:
            gains[part.layer, part.head] = findings.effect(*found)
    weight = "weight" if measured.memory == "residual" else "gate"
    panels = {weight: measured.gates, "share of the output": measured.shares}
    # Without single heads there is nothing to show.
    title = "rise of the loss without it, if any is certain"
    return panels if gains.isnan().all() else panels | {title: gains}


def _summary(measured: Measured) -> str:
    gain = measured.gains[Part()]
    effect = findings.effect(*gain)
    layers = {part.layer: found for part, found in measured.gains.items() if part.head is None}
    del layers[None]
    layer, most = max(layers.items(), key=lambda each: _certain_first(each[1]))
    if not math.isfinite(gain.high - gain.low):
        return (
            "Whether the weights gain by their memory cannot be told from so few windows: without "
            f"it the loss changes by {gain.estimate:z.4f} nats per token. More documents or larger "
            "`data.splits`, give more."
        )
    if not effect:
        return (
            "Whether the weights gain by their memory is uncertain: without it the loss changes by "
            f"{gain} nats per token."
        )
    if effect < 0.0:
        return f"Without its memory the model is better: the loss changes by {gain} nats per token."
    return (
        f"The weights rely on the memory: without it the loss rises by {gain} nats per token. "
        + _counts_most(f"layer {layer}", most)
    )


def _certain_first(rise: Interval) -> tuple[float, float]:
    return findings.effect(*rise), rise.estimate


def _counts_most(name: str, rise: Interval) -> str:
    """Of the part whose loss without its memory rises most."""
    if findings.effect(*rise) <= 0.0:
        return f"Of none alone it is certain; most is {name} with {rise}."
    return f"Most is due to {name}: without its memory alone it rises by {rise}."


def _section(measured: Measured) -> str:
    is_residual = measured.memory == "residual"
    header = (
        "Layer",
        "Weight" if is_residual else "Gate",
        "Of its heads",
        "Share of the output",
        "Loss without it (rise)",
    )
    rows = []
    for layer, (gates, shares) in enumerate(
        zip(measured.gates.tolist(), measured.shares.tolist(), strict=True)
    ):
        mean, places = sum(gates) / len(gates), ".2f" if is_residual else ".0%"
        share = f"{sum(shares) / len(shares):.1%}"
        between = f"{min(gates):{places}} to {max(gates):{places}}"
        gain = str(measured.gains[Part(layer)])
        rows.append((str(layer), f"{mean:{places}}", between, share, gain))
    rows.append(("all", "", "", "", str(measured.gains[Part()])))
    heads = [part for part in measured.gains if part.head is not None]
    notes = [
        f"On {measured.windows:,} windows, in nats per token with intervals of 95%. Layers and "
        "heads are counted from 0. "
        + (
            "The weight is the root mean square of what multiplies the normed read of a head"
            if is_residual
            else "The gate is the weight of the memory in a head's output"
        )
        + "; the "
        "share of the output is the length of what comes from the memory over the lengths of both "
        "parts, at positions that have a memory to read. The loss without it is that of the same "
        "weights and windows with one part of the memory knocked out: it shows what the weights "
        "rely on, not what a model trained without memory would reach."
    ]
    if heads:
        best = max(heads, key=lambda part: _certain_first(measured.gains[part]))
        notes.append(
            f"{len(heads):,} heads were knocked out one by one. "
            + _counts_most(f"head {best.head} of layer {best.layer}", measured.gains[best])
        )
    return "\n\n".join([table(header, rows), *notes])
