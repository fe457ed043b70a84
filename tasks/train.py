"""The train stage: claim a run, launch torchrun or resume it, and show its progress."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from prefect import get_run_logger, task
from prefect.artifacts import LinkArtifact, TableArtifact

from infini_model.config import Config
from infini_model.runtime.claims import claim_run
from infini_model.runtime.metrics_file import Line, newest_lines, read_newest
from infini_model.runtime.runs import is_finished, read_run
from infini_model.training.initial_weights import InitialWeights, record_initial_weights
from infini_model.training.launch.reservation import waiting_note
from infini_model.training.mlflow_record import PAGE, run_url
from infini_model.training.run_status import is_trained, saved_step
from tasks import artifacts
from tasks.artifacts import LiveArtifact, Progress, updates
from tasks.control import stopped_with_flow_run
from tasks.failures import EXPECTED, failure_as_state, note_training, saved_note
from tasks.flow_run import Waiting, current_owner, log_line, name_flow_run
from tasks.shard import Dataset
from tasks.stage import STAGE, TAIL_LINES, named_after_run, run_with_retries
from tasks.weights import fetch_anew

# Between two updates of what Prefect shows of a training.
VIEW_SECONDS = 5.0
ROWS = 20

Row = dict[str, str]


@contextlib.contextmanager
def train(config: Config, dataset: Dataset, weights: InitialWeights | None) -> Iterator[Path]:
    """Train a run of these settings or resume it, and hold it for the block; yields its folder.

    Raises as `claim_run` does, and what the training failed with.
    """
    claim = claim_run(
        config,
        dataset.key,
        dataset.folder,
        weights=None if weights is None else weights.fingerprint,
        address=dataset.address,
        owner=current_owner(),
    )
    with claim as run_dir:
        tags = (f"preset:{config.run.preset or 'custom'}", f"run:{run_dir.name}")
        name_flow_run(run_dir.name, *tags, f"dataset:{dataset.folder.name}")
        _train_claimed(config, dataset, run_dir, weights)
        yield run_dir


def outcome(run_dir: Path) -> str:
    """What came out of a training, in short; of several machines only the first one has losses."""
    newest, said = read_newest(run_dir, "step", "validation/loss"), [f"run {run_dir.name}"]
    if "step" in newest:
        said.append(f"{newest['step']:,.0f} steps")
    if "validation/loss" in newest:
        said.append(f"validation loss {newest['validation/loss']:.3f}")
    return " · ".join(said)


def _train_claimed(
    config: Config, dataset: Dataset, run_dir: Path, weights: InitialWeights | None
) -> None:
    """Train in a run folder that this process has claimed, unless the run is already evaluated.

    A run with its last checkpoint is resumed too: its last scores may not have been written.
    """
    log = get_run_logger()
    if is_finished(run_dir):
        log.info("Run %s is already finished", run_dir)
        return
    if is_trained(run_dir):
        log.info("Run %s is already trained; infini branch trains a new run from it", run_dir)
    else:
        log.info("Training in %s", run_dir)
    if weights is not None:
        # `fetch_weights` may have read them from the record of a run that another process has
        # claimed since; this is a new run then, and needs the files.
        if saved_step(run_dir) is None and not weights.folder.is_dir():
            weights = fetch_anew(config)
        record_initial_weights(run_dir, weights)
    run_with_retries(_train, config.stages.train, config, str(dataset.folder), str(run_dir))


@task(name="train", task_run_name=named_after_run, **STAGE)
@failure_as_state
def _train(config: Config, dataset_dir: str, run_dir: str) -> str:
    """Train in `run_dir`, or resume from its newest checkpoint, as every retry does.

    Whether there is a retry, and with which settings, depends on how the training failed
    (`infini_model.training.launch.recovery`). All retries share one MLflow run. Returns `run_dir`.
    """
    folder = Path(run_dir)
    artifacts.show_folder("run-folder", folder, "Settings, logs, checkpoints and the trained model")
    view, waiting = TrainingView(folder, config), Waiting(waiting_note(folder))
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    try:
        with (
            updates("state of the run", waiting.update, VIEW_SECONDS),
            updates("training table", view.update, VIEW_SECONDS),
        ):
            _launch(config, Path(dataset_dir), folder, tail)
    except EXPECTED as error:
        note_training(error, config, Path(dataset_dir), folder, list(tail))
        raise
    return run_dir


def _launch(config: Config, dataset_dir: Path, run_dir: Path, tail: deque[str]) -> None:
    from infini_model.training.launch.launcher import Job, launch

    def on_line(line: str) -> None:
        log_line(line)
        tail.append(line)

    with (
        Progress("train", "steps", logged=False) as progress,
        stopped_with_flow_run(lambda: saved_note(run_dir)) as stop,
    ):
        job = Job(
            config,
            dataset_dir,
            run_dir,
            timeout_seconds=config.stages.train.timeout_seconds,
            on_line=on_line,
            on_progress=progress.show,
            stop=stop,
        )
        launch(job)


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
        # A step has a line of its own, and perhaps two of validation and test.
        newest = list(itertools.islice(newest_lines(self._run_dir), 3 * ROWS))
        lines = [json.loads(line) for line in reversed(newest)]
        if lines and self._steps is None:
            self._steps = read_run(self._run_dir).max_steps
        rows = list(table_rows(lines, self._steps))[-ROWS:]
        if rows and rows != self._shown:
            headline = " · ".join(f"{name} {value}" for name, value in rows[-1].items() if value)
            self._table.show(TableArtifact(table=rows[::-1], description=headline))
            self._shown = rows


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
