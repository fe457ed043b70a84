"""The train stage: claim a run, launch torchrun or resume it, and show its progress."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from prefect import get_run_logger
from prefect.artifacts import LinkArtifact

from infini_model.config import Config
from infini_model.data.build import Dataset
from infini_model.runtime.claims import claim_run
from infini_model.runtime.metrics_file import read_newest
from infini_model.runtime.runs import is_finished, read_run
from infini_model.training.initial_weights import InitialWeights, record_initial_weights
from infini_model.training.launch.reservation import waiting_note
from infini_model.training.mlflow_record import PAGE, run_url
from infini_model.training.run_status import is_trained, saved_step
from tasks import artifacts
from tasks.artifacts import LiveArtifact, progress, updates
from tasks.control import stopped_with_flow_run
from tasks.failures import EXPECTED, note_training, saved_note
from tasks.flow_run import Waiting, current_owner, log_line, name_flow_run
from tasks.stage import TAIL_LINES, run_with_retries
from tasks.weights import fetch_anew

# Between two updates of what Prefect shows of a training.
VIEW_SECONDS = 5.0


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


def newest_step(run_dir: Path) -> str:
    """Describe the newest step of a training; empty without one, as on all machines but one."""
    newest = read_newest(run_dir, "step", "train/loss", "train/tokens_per_second")
    if "train/loss" not in newest:
        return ""
    loss, speed = newest["train/loss"], newest.get("train/tokens_per_second", 0.0)
    step = f"step {newest['step']:,.0f} of {read_run(run_dir).max_steps:,}"
    return f"{step} · loss {loss:.4f} · {speed:,.0f} tokens/s"


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
    run_with_retries(_train, config.stages, "train", run_dir.name, config, dataset.folder, run_dir)


def _train(config: Config, dataset_dir: Path, run_dir: Path) -> None:
    """Train in `run_dir`, or resume from its newest checkpoint, as every retry does.

    Whether there is a retry, and with which settings, depends on how the training failed
    (`infini_model.training.launch.recovery`). All retries share one MLflow run.
    """
    from infini_model.training.launch.launcher import Job, launch

    about = "Settings, logs, checkpoints and the trained model"
    artifacts.show_folder("run-folder", run_dir, about)
    mlflow, waiting = LiveArtifact("mlflow"), Waiting(waiting_note(run_dir))
    tail: deque[str] = deque(maxlen=TAIL_LINES)

    def show_state() -> None:
        waiting.update()
        if link := mlflow_link(run_dir, config):
            mlflow.show(link)

    def on_line(line: str) -> None:
        log_line(line)
        tail.append(line)

    try:
        with (
            updates("state of the run", show_state, VIEW_SECONDS),
            progress("train", "steps", logged=False, note=lambda: newest_step(run_dir)) as show,
            stopped_with_flow_run(lambda: saved_note(run_dir)) as stop,
        ):
            launch(Job(config, dataset_dir, run_dir, on_line=on_line, on_progress=show, stop=stop))
    except EXPECTED as error:
        note_training(error, config, dataset_dir, run_dir, list(tail))
        raise


def mlflow_link(run_dir: Path, config: Config) -> LinkArtifact | None:
    """A link to the page of a run in MLflow; None if it has no page, or no record yet."""
    url = run_url(os.environ.get(PAGE), run_dir) if config.tracking.mlflow else None
    if url is None:
        return None
    description = "Curves, settings and files of the run"
    return LinkArtifact(link=url, link_text="The run in MLflow", description=description)
