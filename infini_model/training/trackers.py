"""Weights & Biases, and trackio, which has the same interface.

Both follow `metrics.jsonl` as MLflow does. Neither takes more of a step that it already has, so the
lines of a step are one row, which is sent once there is a later one, or at the end.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infini_model.config import Config, leaves
from infini_model.runtime.errors import ConfigError
from infini_model.runtime.metrics_file import Line, metrics_of, read_metrics
from infini_model.runtime.storage import make_folder, read_json_or_empty, write_json
from infini_model.training.callbacks import Status
from infini_model.training.mlflow_record import error_summary

# How long Weights & Biases may take to open a run and to close it, in seconds. The second is less
# than what the end of a training waits for its exporters.
OPEN_SECONDS, CLOSE_SECONDS = 20.0, 10.0

NAMES = ("wandb", "trackio")

log = logging.getLogger(__name__)


class Tracker:
    """The record of a run in one of the two, which is created if missing.

    `logs/<name>.json` in the run folder says which it is, so that a run that is resumed keeps it.
    Each step is recorded once: on opening a record, the tracker says which one is next.
    """

    def __init__(self, name: str, run_dir: Path, config: Config) -> None:
        """`name` is one of `NAMES`."""
        self.name, self._run_dir, self._config = name, run_dir, config
        self._run: Any = None
        # The rows that are not sent yet, by step, and the first step to send.
        self._rows: dict[int, dict[str, float]] = {}
        self._next = 0

    def export(self, lines: Sequence[Line]) -> None:
        """Send the rows of those steps in `lines` after which another one began."""
        if self._run is None:
            self._run, self._rows = self._open(), {}
            lines = read_metrics(self._run_dir)
        for line in lines:
            if (step := int(line["step"])) >= self._next:
                self._rows.setdefault(step, {}).update(metrics_of(line))
        self._send([*self._rows][:-1])

    def finish(self, status: Status) -> None:
        """Send the rest and close the record.

        The row of the newest step waits in a training that is to be resumed, since the step may
        still be validated.
        """
        if status == "FINISHED":
            self._send([*self._rows])
        run, self._run = self._run, None
        if self.name == "wandb":
            run.finish(exit_code=0 if status == "FINISHED" else 1)
        else:
            run.finish()

    def score(self, step: int, scores: Mapping[str, float]) -> None:
        """Send what an evaluation of `step` found; call after `export`."""
        if self.name == "wandb":
            self._run.summary.update(scores)
        else:
            self._send([*self._rows])
            self._run.log(dict(scores), step=step)

    def _send(self, steps: Sequence[int]) -> None:
        for step in steps:
            self._run.log(self._rows.pop(step), step=step)
            self._next = step + 1

    def _open(self) -> Any:
        """Open the record, and find out which step it lacks first."""
        logs = make_folder(self._run_dir / "logs")
        path, config = logs / f"{self.name}.json", self._config.model_dump(mode="json")
        record = {"id": uuid.uuid4().hex[:8]} | read_json_or_empty(path)
        settings: dict[str, Any] = {"config": dict(leaves(config)), "resume": "allow"}
        if self.name == "trackio":
            import trackio

            write_json(path, record)
            run: Any = trackio.init(
                self._config.tracking.experiment_name,
                # It finds a run by its name alone.
                name=f"{self._run_dir.name}-{record['id']}",
                auto_log_gpu=False,
                auto_log_cpu=False,
                **settings,
            )
            self._next = run._next_step  # there is no other way to ask
            return run
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        make_folder(logs / ".wandb")  # it takes this one, which stays on this machine
        options = wandb.Settings(
            console="off",
            init_timeout=OPEN_SECONDS,
            finish_timeout=CLOSE_SECONDS,
            finish_timeout_raises=True,
        )
        try:
            run = wandb.init(
                project=self._config.tracking.wandb,
                id=record["id"],
                name=self._run_dir.name,
                dir=str(logs),
                settings=options,
                **settings,
            )
        except Exception:
            # Otherwise its process says of every later attempt that the run is in use.
            wandb.teardown()
            raise
        self._next = run.starting_step
        write_json(path, record | {"url": run.url})
        log.info("Weights & Biases: %s", run.url or f"offline, in {logs / '.wandb'}")
        return run


def trackers_of(run_dir: Path, config: Config) -> list[Tracker]:
    """The trackers that the settings name. Raises `ConfigError` if one is not installed."""
    names = [name for name in NAMES if getattr(config.tracking, name)]
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"tracking.{name}: needs a package: pip install 'infini-model[{name}]'"
            )
    return [Tracker(name, run_dir, config) for name in names]


def is_installed(name: str) -> bool:
    """Return whether a tracker that is on by default is installed; log if it is not."""
    if importlib.util.find_spec(name) is not None:
        return True
    log.info("%s is not installed: metrics.jsonl and the report have all that it would show", name)
    return False


def send_evaluation(trackers: Sequence[Tracker], step: int, scores: Mapping[str, float]) -> None:
    """Send the scores of a finished run, and what a tracker has missed; warn of one that is down.

    `step` is the last one of the run.
    """
    for tracker in trackers:
        try:
            tracker.export([])
            tracker.score(step, scores)
            tracker.finish("FINISHED")
        except Exception as error:  # noqa: BLE001 - the results are in the run folder anyway
            reason = error_summary(error)
            log.warning("cannot send the scores to %s (%s)", tracker.name, reason)
