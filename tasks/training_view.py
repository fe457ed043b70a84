"""The artifacts of a running training in Prefect: its newest steps, and a link to MLflow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from prefect.artifacts import LinkArtifact, TableArtifact

from infini_model.config import Config
from infini_model.runtime.metrics_file import Line, whole_lines
from infini_model.runtime.runs import read_run
from infini_model.training.callbacks.mlflow_record import PAGE, run_url
from tasks.artifacts import LiveArtifact

SECONDS = 5.0
ROWS = 20
# How much of the end of metrics.jsonl is read: some hundreds of lines.
TAIL_BYTES = 1 << 17

Row = dict[str, str]


def mlflow_link(run_dir: Path, config: Config) -> LinkArtifact | None:
    """A link to the page of a run in MLflow; None if it has no page, or no record yet."""
    # A database address has no page; infini serve may have one.
    uri = config.tracking_uri
    page = uri if uri.startswith("http") else os.environ.get(PAGE)
    url = page and config.tracking.mlflow and run_url(page, run_dir)
    if not url:
        return None
    description = "Curves, settings and files of the run"
    return LinkArtifact(link=url, link_text="The run in MLflow", description=description)


class TrainingView:
    """The artifacts `training` (a table, the newest step first) and `mlflow` (a link) of a run."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        self._run_dir, self._config, self._steps = run_dir, config, config.training.max_steps
        self._table, self._link = LiveArtifact("training"), LiveArtifact("mlflow")
        self._shown: list[Row] = []
        self._linked: str | None = None

    def update(self) -> None:
        """Show what has changed. Raises what Prefect's client raises."""
        link = mlflow_link(self._run_dir, self._config)
        if link and link.link != self._linked:
            self._link.show(link)
            self._linked = link.link
        lines = _newest_lines(self._run_dir)
        if lines and self._steps is None:
            self._steps = read_run(self._run_dir).max_steps
        rows = list(table_rows(lines, self._steps))[-ROWS:]
        if rows and rows != self._shown:
            headline = " · ".join(f"{name} {value}" for name, value in rows[-1].items() if value)
            self._table.show(TableArtifact(table=rows[::-1], description=headline))
            self._shown = rows


def _newest_lines(run_dir: Path) -> list[Line]:
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            start = max(0, file.seek(0, 2) - TAIL_BYTES)
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return []
    # Unless the whole file was read, the first line is incomplete.
    return whole_lines(data if start == 0 else data[data.find(b"\n") + 1 :])


def table_rows(lines: list[Line], max_steps: int | None) -> Iterator[Row]:
    """One row per trained step, with the validation loss that another line may hold.

    Without `max_steps`, which `training.epochs` leaves open at first, there is no total and no ETA.
    """
    merged: dict[float, Line] = {}
    for line in lines:
        merged.setdefault(line["step"], {}).update(line)
    for step, line in merged.items():
        if "train/loss" not in line:
            continue
        total, eta = "", ""
        if max_steps is not None:
            seconds = round((max_steps - step) * line.get("train/step_seconds", 0.0))
            total, eta = f" of {max_steps}", str(timedelta(seconds=seconds))
        validation = line.get("validation/loss")
        yield {
            "step": f"{step:.0f}{total}",
            "loss": f"{line['train/loss']:.4f}",
            "validation loss": "" if validation is None else f"{validation:.4f}",
            "tokens/s": f"{line.get('train/tokens_per_second', 0.0):,.0f}",
            "ETA": eta,
        }
