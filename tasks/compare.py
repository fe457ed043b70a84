"""The compare stage: write the comparison of some runs, and show it in Prefect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefect import task

from infini_model.evaluation.compare import Comparison, compare
from infini_model.evaluation.comparison_page import Files, write_comparison
from tasks import artifacts
from tasks.failures import failure_as_state
from tasks.stage import STAGE


@task(name="compare", **STAGE)
@failure_as_state
def compare_runs(
    run_dirs: Sequence[Path], failures: Sequence[str], comparisons_dir: Path
) -> tuple[Comparison, Files]:
    """Write Markdown, HTML and a picture; `failures` are sentences on runs that are left out."""
    comparison = compare(run_dirs, failures)
    files = write_comparison(comparison, comparisons_dir)
    folder = "The comparison for a browser (comparison.html) and as Markdown, and its picture"
    artifacts.show_folder("comparison-folder", files.html.parent, folder)
    description = f"Open this first: what came out. For a browser it is {files.html}"
    pictures = [] if files.curves is None else [files.curves]
    artifacts.show_report("comparison", files.markdown, pictures, description)
    return comparison, files
