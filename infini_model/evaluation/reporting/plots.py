"""The plots of a report, drawn by matplotlib without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from infini_model.evaluation.statistics import Interval
from infini_model.runtime.metrics_file import Line
from infini_model.runtime.storage import atomic_file

BLUE, ORANGE, GREEN = "#2563eb", "#ea580c", "#059669"
# Of several runs, told apart by people of any colour vision (Okabe and Ito) as far as they last.
RUN_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b7280")
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


def _reach(points: Series) -> int:
    """Points on either side of the middle of a moving mean."""
    return len(points[0]) // 40


def _moving_mean(points: Series) -> Series:
    """A curve smoothed. The window narrows at both ends, so that the whole curve is covered."""
    import numpy as np

    steps, values = points
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    reach = np.minimum(_reach(points), np.minimum(index, index[::-1]))
    mean = (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)
    return steps, mean.tolist()


def _noisy_line(axis: Any, points: Series, *, color: str, label: str) -> None:
    """A noisy curve: the raw values, faint, under their moving mean."""
    if len(points[0]) <= FEW_POINTS:
        _line(axis, points, color=color, label=label)
        return
    _line(axis, points, color=color, alpha=0.3, linewidth=0.9)
    label = f"{label} (mean of {2 * _reach(points) + 1} points)"
    _line(axis, _moving_mean(points), color=color, label=label)


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


def plot_by_position(
    losses: Mapping[str, Series],
    gains: Mapping[str, Sequence[Interval]],
    position: str,
    path: Path,
) -> Path:
    """Losses by position, and below them what the memory gains, if measured.

    Args:
        losses: Curves by name.
        gains: Gains of the first curves, by their names: at positions 1, 2 and so on, with their
            intervals as bands.
        position: Label of the positions.
        path: Path of the image.
    """
    figure, axes = _figure(rows=2 if gains else 1)
    colors = dict(zip(losses, (BLUE, GREEN, ORANGE), strict=False))
    for name, curve in losses.items():
        _line(axes[0], curve, color=colors[name], label=name)
    axes[0].set_ylabel("loss\n(nats per token)")
    axes[0].legend(frameon=False)
    for name, intervals in gains.items():
        estimates, lows, highs = ([each[i] for each in intervals] for i in range(3))
        positions = [i + 1.0 for i in range(len(intervals))]
        axes[1].fill_between(positions, lows, highs, color=colors[name], alpha=0.18, linewidth=0)
        _line(axes[1], (positions, estimates), color=colors[name], label=name)
    if gains:
        axes[1].axhline(0.0, color="#374151", linewidth=0.8)
        axes[1].set_ylabel("gain over\nmemory knocked out")
    axes[-1].set_xlabel(position)
    axes[-1].set_xlim(0.5, max(x for xs, _ in losses.values() for x in xs) + 0.5)
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    return _save(figure, "Loss by position", path)


def plot_heads(panels: Mapping[str, Tensor], path: Path) -> Path:
    """Heat maps of layers by heads, side by side.

    Args:
        panels: By title, [layers, H]; NaN is drawn grey. With a negative value the colours diverge
            from zero.
        path: Path of the image.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers = max(len(panel) for panel in panels.values())
    height = min(9.0, 3.2 + 0.2 * layers)
    figure = Figure(figsize=(3.4 * len(panels), height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (title, panel) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        values = panel.double().numpy()
        known = panel[~panel.isnan()].tolist()
        # Smaller values are none, as they would be shown as 0.
        most = max(max(map(abs, known)), 1e-4)
        diverging = min(known) < 0.0
        image = axis.imshow(
            values,
            cmap="RdBu" if diverging else "Blues",
            vmin=-most if diverging else 0.0,
            vmax=most,
            aspect="auto",
        )
        axis.set_facecolor("#e5e7eb")
        axis.set(xlabel="head")
        axis.set_title(title, loc="left", fontsize=10, color="#111827")
        for ticks in (axis.xaxis, axis.yaxis):
            ticks.get_major_locator().set_params(integer=True)
        axis.tick_params(colors="#374151")
        figure.colorbar(image, ax=axis, shrink=0.9, format="%.3g")
    figure.axes[0].set_ylabel("layer")
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png")
    return path


def plot_speed_by_length(
    lengths: Sequence[int],
    rates: Mapping[str, Sequence[tuple[float, float, float]]],
    peaks: Sequence[float] | None,
    path: Path,
) -> Path:
    """Tokens per second, and peak memory, by the length of the prompt.

    Args:
        lengths: Tokens of the prompts, ascending.
        rates: Tokens per second at each length by name: median, lowest and highest.
        peaks: Peak memory at each length, in bytes; None leaves it out.
        path: Path of the image.
    """
    figure, axes = _figure(rows=1 if peaks is None else 2)
    positions = [float(each) for each in lengths]
    for (name, measured), color in zip(rates.items(), (BLUE, ORANGE), strict=False):
        medians, lows, highs = (list(each) for each in zip(*measured, strict=True))
        _line(axes[0], (positions, medians), color=color, label=name)
        axes[0].fill_between(positions, lows, highs, color=color, alpha=0.2, linewidth=0)
    axes[0].set_ylabel("tokens per second")
    axes[0].set_yscale("log")
    axes[0].legend(frameon=False)
    if peaks is not None:
        _line(axes[1], (positions, [each / 2**20 for each in peaks]), color=GREEN)
        axes[1].set_ylabel("peak memory (MiB)")
        axes[1].set_ylim(0, 1.2 * max(peaks) / 2**20)
    axes[-1].set_xscale("log", base=2)
    axes[-1].set_xticks(positions, labels=[f"{each:,}" for each in lengths])
    axes[-1].set_xlabel("tokens of the prompt")
    return _save(figure, "Speed and memory by length", path)


def plot_runs(runs: Sequence[tuple[str, Sequence[Line]]], path: Path) -> Path | None:
    """Validation loss, and the moving mean of the training loss, of several runs.

    Args:
        runs: Label and metrics of each run; those of the same label share a colour.
        path: Path of the image.

    Returns:
        `path`; None if no run has recorded a training loss.
    """
    trained = [series(lines, "train/loss") for _, lines in runs]
    if not any(steps for steps, _ in trained):
        return None
    figure, (above, below) = _figure(rows=2)
    figure.set_size_inches(8, 6.5)
    labels = list(dict.fromkeys(label for label, _ in runs))
    for (label, lines), points in zip(runs, trained, strict=True):
        color = RUN_COLORS[labels.index(label) % len(RUN_COLORS)]
        _line(above, series(lines, "validation/loss"), color=color, label=label)
        _line(below, _moving_mean(points), color=color, marker="", linewidth=1.2)
    handles, names = above.get_legend_handles_labels()
    once = dict(zip(names, handles, strict=True))
    above.set_ylabel("validation loss\n(nats per token)")
    below.set(xlabel="step", ylabel="training loss, smoothed\n(nats per token)")
    above.legend(once.values(), once.keys(), frameon=False, fontsize=8)
    return _save(figure, "Loss", path)
