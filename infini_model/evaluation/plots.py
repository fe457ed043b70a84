"""The plots of a report, drawn by matplotlib without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infini_model.evaluation.statistics import Interval
from infini_model.runtime.metrics_file import Line
from infini_model.runtime.storage import atomic_file

BLUE, ORANGE, GREEN = "#2563eb", "#ea580c", "#059669"
Series = tuple[list[float], list[float]]
# Up to this many points are marked with dots and drawn without a moving mean.
FEW_POINTS = 40
# Up to this many columns of a heat map are labelled with their percentages.
LABELLED = 12
# Share from which on its colours are bright.
BRIGHT = 0.55


def series(lines: Sequence[Line], name: str) -> Series:
    """Steps and values of a metric, in order; empty if it was never recorded."""
    points = [(line["step"], line[name]) for line in lines if name in line]
    return [step for step, _ in points], [value for _, value in points]


def _figure(
    xlabel: str, *ylabels: str, size: tuple[float, float] = (8, 4.5)
) -> tuple[Any, list[Any]]:
    """A figure with an axis for each of `ylabels`, one below the other, rendered in memory."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(ylabels), 1, sharex=True, squeeze=False)[:, 0]
    axes[-1].set_xlabel(xlabel)
    for axis, ylabel in zip(axes, ylabels, strict=True):
        axis.set_ylabel(ylabel)
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
    steps, values = points
    if len(steps) <= FEW_POINTS:
        _line(axis, points, color=color, label=label)
        return
    _line(axis, points, color=color, alpha=0.3, linewidth=0.9)
    sums, most = np.concatenate([[0.0], np.cumsum(values)]), len(values) // 40
    # The mean is over fewer points at both ends of the curve.
    index = np.arange(len(values))
    reach = np.minimum(most, np.minimum(index, index[::-1]))
    mean = (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)
    _line(
        axis, (steps, mean.tolist()), color=color, label=f"{label} (mean of {2 * most + 1} points)"
    )


def plot_training(lines: Sequence[Line], clip: float, folder: Path) -> dict[str, Path]:
    """The curves of a training that took a step: the paths in `folder`, by caption.

    `clip` is the threshold of the gradient norm.
    """
    figure, (axis,) = _figure("step", "loss (nats per token)")
    _noisy_line(axis, series(lines, "train/loss"), color=BLUE, label="training")
    _line(axis, series(lines, "validation/loss"), color=ORANGE, label="validation")
    axis.legend(frameon=False)
    paths = {"Training and validation loss": _save(figure, "Loss", folder / "loss.png")}

    figure, (axis,) = _figure("step", "learning rate")
    _line(axis, series(lines, "train/learning_rate"), color=BLUE)
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter("{x:g}")
    paths["Learning rate"] = _save(figure, "Learning rate", folder / "learning_rate.png")

    figure, (axis,) = _figure("step", "gradient norm")
    _noisy_line(axis, series(lines, "train/grad_norm"), color=BLUE, label="before clipping")
    axis.axhline(clip, color=ORANGE, linewidth=1.2, linestyle="--", label=f"clipped to {clip:g}")
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)
    path = _save(figure, "Gradient norm", folder / "gradient_norm.png")
    paths["Gradient norm before clipping"] = path

    figure, (axis,) = _figure("step", "tokens per second")
    _line(axis, series(lines, "train/tokens_per_second"), color=BLUE)
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter("{x:,.0f}")
    paths["Tokens per second"] = _save(figure, "Throughput", folder / "throughput.png")
    return paths


def plot_by_position(
    losses: Mapping[str, Series],
    gains: Sequence[Interval],
    position: str,
    path: Path,
) -> Path:
    """Losses by position, and below them what the memory gains, if measured.

    `losses` are curves by name; `gains` are those of the first one at positions 1, 2 and so on.
    """
    labels = ("loss\n(nats per token)", "gain over\nmemory knocked out")
    figure, axes = _figure(position, *labels[: 2 if gains else 1])
    for (name, curve), color in zip(losses.items(), (BLUE, GREEN, ORANGE), strict=False):
        _line(axes[0], curve, color=color, label=name)
    axes[0].legend(frameon=False)
    if gains:
        estimates, lows, highs = ([*each] for each in zip(*gains, strict=True))
        positions = [i + 1.0 for i in range(len(gains))]
        axes[1].fill_between(positions, lows, highs, color=BLUE, alpha=0.18, linewidth=0)
        _line(axes[1], (positions, estimates), color=BLUE)
        axes[1].axhline(0.0, color="#374151", linewidth=0.8)
    axes[-1].set_xlim(0.5, max(x for xs, _ in losses.values() for x in xs) + 0.5)
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    return _save(figure, "Loss by position", path)


def plot_heat_map(
    shares: np.ndarray,
    lengths: Sequence[str],
    depths: Sequence[float],
    path: Path,
    *,
    title: str,
    trained: int,
) -> Path:
    """Percentages of right answers as colours: dark is 0, bright is 100 in every picture.

    `shares` [depths, lengths] are from 0 to 1; `lengths` are labels, from short to long, and
    `depths` percentages. The first `trained` lengths are no longer than those of the training.
    """
    size = (8, max(3.5, 1.6 + 0.22 * len(depths)))
    figure, (axis,) = _figure("length of the sequence", "depth of the needle (%)", size=size)
    axis.grid(visible=False)
    # Its order of brightness is seen by people of any colour vision, and in print.
    drawn = axis.imshow(100 * shares, cmap="cividis", vmin=0, vmax=100, aspect="auto")
    figure.colorbar(drawn, ax=axis, label="answers that are right (%)")
    axis.set_xticks(range(len(lengths)), lengths)
    axis.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    if len(lengths) <= LABELLED:
        for (row, column), share in np.ndenumerate(shares):
            color = "#111827" if share > BRIGHT else "#f9fafb"
            text = f"{100 * share:.0f}"
            axis.text(column, row, text, ha="center", va="center", size=8, color=color)
    label = "right of this line: longer than the sequences of the training"
    border = trained - 0.5
    axis.axvline(border, color=ORANGE, linewidth=2.5, linestyle="--", clip_on=False, label=label)
    figure.legend(loc="outside lower left", frameon=False)
    return _save(figure, title, path)
