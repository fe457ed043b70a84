"""The files of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from infini_model.evaluation.comparison.compare import Comparison
from infini_model.evaluation.comparison.text import markdown
from infini_model.evaluation.reporting.page import to_html
from infini_model.evaluation.reporting.plots import plot_runs
from infini_model.runtime.storage import atomic_file, content_key

# Longest name of a folder that is made of the names of all runs.
NAME_LENGTH = 80


class Files(NamedTuple):
    """What was written: Markdown, HTML, and the picture of the losses if there are any."""

    markdown: Path
    html: Path
    curves: Path | None


def comparison_name(names: Sequence[str]) -> str:
    """A name for the comparison of these runs, which another set of runs does not have."""
    joined = "-vs-".join(names)
    if len(joined) <= NAME_LENGTH:
        return joined
    words = zip(*(name.split("-") for name in names), strict=False)
    common = "-".join(each[0] for each in takewhile(lambda each: len({*each}) == 1, words))
    key = content_key(list(names))[:8]
    return f"{(common or names[0])[:NAME_LENGTH]}-{len(names)}-runs-{key}"


def write_comparison(comparison: Comparison, comparisons_dir: Path) -> Files:
    """Write `comparison.md`, a self-contained `comparison.html` and `loss.png`.

    Their folder in `comparisons_dir` is named after the runs. Raises `UserError` if it cannot be
    written.
    """
    folder = comparisons_dir / comparison_name([run.name for run in comparison.runs])
    labels = {
        str(run.run_dir): group.label if comparison.has_seeds else name
        for group in comparison.groups
        for run, name in zip(comparison.runs, comparison.names, strict=True)
        if run in group.runs
    }
    drawn = [(labels[str(run.run_dir)], run.lines) for run in comparison.runs]
    curves = plot_runs(drawn, folder / "loss.png")
    text = markdown(comparison, curves, folder)
    title = text.partition("\n")[0].removeprefix("# ")
    page = to_html(text, title, {} if curves is None else {curves.name: curves})
    files = Files(folder / "comparison.md", folder / "comparison.html", curves)
    for path, content in ((files.markdown, text), (files.html, page)):
        with atomic_file(path) as temporary:
            temporary.write_text(content, encoding="utf-8")
    return files
