"""The heat map of a grid: the share of right answers by depth and length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from infini_model.evaluation.reporting.plots import ORANGE
from infini_model.runtime.storage import atomic_file

# Up to this many columns are labelled with their percentages.
LABELLED = 12
# Share from which on the colour map is bright.
BRIGHT = 0.55


def plot_heat_map(
    shares: np.ndarray,
    lengths: Sequence[str],
    depths: Sequence[float],
    path: Path,
    *,
    title: str,
    trained: int,
) -> Path:
    """Draw percentages as colours: dark is 0, bright is 100 in every picture.

    Args:
        shares: [depths, lengths], 0 to 1.
        lengths: Labels of the columns, from short to long.
        depths: Labels of the rows, in percent.
        path: Path of the image.
        title: Title of the picture.
        trained: Number of columns that are no longer than the sequences of the training.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, max(3.5, 1.6 + 0.22 * len(depths))), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    # Its order of brightness is seen by people of any colour vision, and in print.
    drawn = axis.imshow(100 * shares, cmap="cividis", vmin=0, vmax=100, aspect="auto")
    figure.colorbar(drawn, ax=axis, label="answers that are right (%)")
    axis.set_xticks(range(len(lengths)), lengths)
    axis.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    axis.set(xlabel="length of the sequence", ylabel="depth of the needle (%)")
    axis.tick_params(colors="#374151", length=0)
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
    axis.set_title(title, loc="left", fontsize=12, fontweight="bold", color="#111827")
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png")
    return path
