"""The plots of a report, drawn by matplotlib without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infini_model.evaluation.score import Score
from infini_model.runtime.metrics_file import Line
from infini_model.runtime.storage import atomic_file

BLUE, ORANGE, GREEN = "#2563eb", "#ea580c", "#059669"
Series = tuple[list[float], list[float]]
# Up to this many points are marked with dots and drawn without a moving mean.
FEW_POINTS = 40


def series(lines: Sequence[Line], name: str) -> Series:
    """Steps and values of a metric, in order; empty if it was never recorded."""
    points = [(line["step"], line[name]) for line in lines if name in line]
    return [step for step, _ in points], [value for _, value in points]


def _figure(rows: int = 1) -> tuple[Any, list[Any]]:
    """A figure with `rows` stacked axes, rendered in memory."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    for axis in axes:
        axis.grid(visible=True, color="#e5e7eb", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color("#9ca3af")
        axis.tick_params(colors="#374151")
    return figure, list(axes)


def _save(figure: Any, title: str, path: Path) -> Path:
    figure.axes[0].set_title(title, loc="left", fontsize=12, fontweight="bold", color="#111827")
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png")
    return path


def _line(axis: Any, points: Series, **style: Any) -> None:
    """A curve, with dots if there are few points, so that a single point is visible."""
    marker = "o" if len(points[0]) <= FEW_POINTS else ""
    axis.plot(*points, **{"marker": marker, "markersize": 3.5, "linewidth": 1.6} | style)


def _noisy_line(axis: Any, points: Series, *, color: str, label: str) -> None:
    """A noisy curve: the raw values, faint, under their moving mean."""
    import numpy as np

    steps, values = points
    if len(steps) <= FEW_POINTS:
        _line(axis, points, color=color, label=label)
        return
    half = len(steps) // 40
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    # The window narrows at both ends, so that the mean covers the whole curve.
    reach = np.minimum(half, np.minimum(index, index[::-1]))
    mean = (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)
    _line(axis, points, color=color, alpha=0.3, linewidth=0.9)
    label = f"{label} (mean of {2 * half + 1} points)"
    _line(axis, (steps, mean.tolist()), color=color, label=label)


def plot_loss(lines: Sequence[Line], path: Path) -> Path:
    """Training and validation loss by step."""
    figure, (axis,) = _figure()
    _noisy_line(axis, series(lines, "train/loss"), color=BLUE, label="training")
    _line(axis, series(lines, "validation/loss"), color=ORANGE, label="validation")
    axis.set(xlabel="step", ylabel="loss (nats per token)")
    axis.legend(frameon=False)
    return _save(figure, "Loss", path)


def plot_learning_rate(lines: Sequence[Line], path: Path) -> Path:
    """Learning rate by step."""
    figure, (axis,) = _figure()
    _line(axis, series(lines, "train/learning_rate"), color=BLUE)
    axis.set(xlabel="step", ylabel="learning rate")
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter("{x:g}")
    return _save(figure, "Learning rate", path)


def plot_gradient_norm(lines: Sequence[Line], clip: float, path: Path) -> Path:
    """Gradient norm before clipping by step, and the clipping threshold."""
    figure, (axis,) = _figure()
    _noisy_line(axis, series(lines, "train/grad_norm"), color=BLUE, label="before clipping")
    axis.axhline(clip, color=ORANGE, linewidth=1.2, linestyle="--", label=f"clipped to {clip:g}")
    axis.set(xlabel="step", ylabel="gradient norm")
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)
    return _save(figure, "Gradient norm", path)


def plot_throughput(lines: Sequence[Line], path: Path) -> Path:
    """Tokens per second, and the share of a step spent waiting for data, by step."""
    figure, (speed, wait) = _figure(rows=2)
    _line(speed, series(lines, "train/tokens_per_second"), color=BLUE)
    speed.set_ylabel("tokens per second")
    speed.set_ylim(bottom=0)
    speed.yaxis.set_major_formatter("{x:,.0f}")
    timed = [line for line in lines if line.get("train/step_seconds", 0.0) > 0.0]
    steps, waits = series(timed, "train/data_wait_seconds")
    seconds = dict(zip(*series(timed, "train/step_seconds"), strict=True))
    shares = [100.0 * w / seconds[step] for step, w in zip(steps, waits, strict=True)]
    _line(wait, (steps, shares), color=GREEN)
    wait.set(xlabel="step", ylabel="waiting for data\n(% of a step)")
    wait.set_ylim(0, max([1.0, *shares]) * 1.1)
    return _save(figure, "Throughput", path)


def plot_segments(
    scores: Mapping[str, Score], emptied: Mapping[str, Score], segment_length: int, path: Path
) -> Path:
    """Loss by segment of the window.

    Args:
        scores: Scores by name, drawn as solid curves.
        emptied: Scores with the memory emptied before every segment, under the same names, drawn
            as dashed curves of the same colour.
        segment_length: Tokens per segment, for the axis label.
        path: Path of the image.
    """
    figure, (axis,) = _figure()
    for (name, scored), color in zip(scores.items(), (BLUE, ORANGE, GREEN), strict=False):
        _line(axis, _by_segment(scored), color=color, label=name)
        if name in emptied:
            label = f"{name}, memory emptied before every segment"
            _line(axis, _by_segment(emptied[name]), color=color, linestyle="--", label=label)
    axis.set(
        xlabel=f"segment of the window ({segment_length:,} tokens each)",
        ylabel="loss (nats per token)",
    )
    axis.set_xlim(0.5, max(len(scored.loss_by_segment) for scored in scores.values()) + 0.5)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(frameon=False)
    return _save(figure, "Loss by segment", path)


def _by_segment(scored: Score) -> Series:
    """Segments, counted from 1, and their losses; segments without tokens are left out."""
    points = [(i + 1.0, x) for i, x in enumerate(scored.loss_by_segment) if x is not None]
    return [number for number, _ in points], [loss for _, loss in points]
