"""The train stage: launch torchrun, retry from the newest checkpoint, show progress."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from prefect import task

from infini_model.config import Config
from infini_model.training.launch.reservation import waiting_note
from tasks import artifacts
from tasks.artifacts import Updates
from tasks.control import stopped_with_flow_run
from tasks.failures import EXPECTED, failure_as_state, note_training, saved_note
from tasks.flow_run import Waiting, log_line
from tasks.progress import Progress
from tasks.stage import STAGE, TAIL_LINES, named_after_run
from tasks.training_view import SECONDS, TrainingView


@task(name="train", task_run_name=named_after_run, **STAGE)
@failure_as_state
def train_model(config: Config, dataset_dir: str, run_dir: str) -> str:
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
            Updates("state of the run", waiting.update, SECONDS),
            Updates("training table", view.update, SECONDS),
        ):
            _train(config, Path(dataset_dir), folder, tail)
    except EXPECTED as error:
        note_training(error, config, Path(dataset_dir), folder, list(tail))
        raise
    return run_dir


def _train(config: Config, dataset_dir: Path, run_dir: Path, tail: deque[str]) -> None:
    from infini_model.training.launch.launcher import launch

    def on_line(line: str) -> None:
        log_line(line)
        tail.append(line)

    with (
        Progress("train", "steps", logged=False) as progress,
        stopped_with_flow_run(lambda: saved_note(run_dir)) as stop,
    ):
        launch(
            config,
            dataset_dir,
            run_dir,
            timeout_seconds=config.stages.train.timeout_seconds,
            on_line=on_line,
            on_progress=progress.show,
            stop=stop,
        )
