"""What a training shows in Prefect while it runs: its newest steps, and a link to MLflow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from prefect.artifacts import LinkArtifact, TableArtifact

from infini_model.config import Config
from infini_model.runtime.metrics_file import Line, whole_lines
from infini_model.runtime.runs import last_step
from infini_model.training.callbacks.mlflow_record import PAGE, run_url
from tasks.artifacts import LiveArtifact

SECONDS = 5.0
ROWS = 20
# The end of metrics.jsonl that is read: some hundreds of lines.
TAIL_BYTES = 1 << 17

Row = dict[str, str]


class TrainingView:
    """The artifacts `training` (a table, the newest step first) and `mlflow` (a link) of a run."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        self._run_dir, self._steps = run_dir, config.training.max_steps
        # A database has no page of its own.
        uri = config.tracking_uri
        page = uri if uri.startswith("http") else os.environ.get(PAGE)
        self._mlflow = page if config.tracking.mlflow else None
        self._table, self._link = LiveArtifact("training"), LiveArtifact("mlflow")
        self._shown: list[Row] = []
        self._linked: str | None = None

    def update(self) -> None:
        """Show what is new. Raises what Prefect's client raises."""
        url = self._mlflow and run_url(self._mlflow, self._run_dir)
        if url and url != self._linked:
            self._link.show(LinkArtifact(link=url, link_text="The run in MLflow"))
            self._linked = url
        lines = _newest_lines(self._run_dir)
        if lines and self._steps is None:
            self._steps = last_step(self._run_dir)
        rows = list(_rows(lines, self._steps or 0))[-ROWS:]
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
    # The first line is cut unless the whole file was read.
    return whole_lines(data if start == 0 else data[data.find(b"\n") + 1 :])


def _rows(lines: list[Line], max_steps: int) -> Iterator[Row]:
    """One row for each step that was trained; a validation is a line of its own."""
    merged: dict[float, Line] = {}
    for line in lines:
        merged.setdefault(line["step"], {}).update(line)
    for step, line in merged.items():
        if "train/loss" not in line:
            continue
        seconds = round((max_steps - step) * line.get("train/step_seconds", 0.0))
        validation = line.get("validation/loss")
        yield {
            "step": f"{step:.0f} of {max_steps}",
            "loss": f"{line['train/loss']:.4f}",
            "validation loss": "" if validation is None else f"{validation:.4f}",
            "tokens/s": f"{line.get('train/tokens_per_second', 0.0):,.0f}",
            "ETA": str(timedelta(seconds=seconds)),
        }
