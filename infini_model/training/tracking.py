"""Exporters that follow `metrics.jsonl`: TensorBoard, MLflow, and other trackers.

Each runs in its own thread, so one that is slow or down never delays the training. It receives
what it missed once it is back, at the end, or when the run is next resumed or evaluated.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from infini_model.config import Config
from infini_model.runtime.metrics_file import Line, metrics_of, whole_lines
from infini_model.runtime.storage import content_key
from infini_model.training.callbacks import Callback, Status
from infini_model.training.mlflow_record import MlflowExporter, error_summary
from infini_model.training.trackers import is_installed, trackers_of

POLL_SECONDS = 0.5
# Retries of a failing exporter back off exponentially up to this delay.
MAX_DELAY_SECONDS = 60.0
# How long the end of a training waits for the exporters.
CLOSE_TIMEOUT_SECONDS = 15.0

log = logging.getLogger(__name__)


class Exporter(Protocol):
    """A destination of the metrics; any exception is caught and the delivery retried."""

    name: str

    def export(self, lines: Sequence[Line]) -> None:
        """Send the lines after those of the last successful call; there may be none."""

    def finish(self, status: Status) -> None:
        """Close the record of the run with its final `status`."""


class Follower(threading.Thread):
    """Tails `metrics.jsonl` and delivers new lines to one exporter."""

    def __init__(self, run_dir: Path, exporter: Exporter) -> None:
        super().__init__(name=f"follower of {exporter.name}", daemon=True)
        self._path, self._offset = run_dir / "metrics.jsonl", 0
        self.exporter = exporter
        self._ending = threading.Event()
        self._status: Status = "FINISHED"
        self._deadline = math.inf
        self.done = False

    def end(self, status: Status, deadline: float) -> None:
        """Ask it to deliver the rest and finish by `deadline` (on time.monotonic's clock)."""
        self._status, self._deadline = status, deadline
        self._ending.set()

    def run(self) -> None:
        """Deliver until ended, retrying a failing exporter with exponential backoff."""
        delay, failed, warned = 0.0, False, False
        while time.monotonic() < self._deadline:
            if self._ending.wait(delay) and failed:
                time.sleep(POLL_SECONDS)
            # Checked before reading, so that everything written before the end is delivered.
            ending = self._ending.is_set()
            try:
                self._export_new()
                if ending:
                    self.exporter.finish(self._status)
                    self.done = True
                    return
                delay, failed = POLL_SECONDS, False
            except Exception as error:  # noqa: BLE001 - no exporter may harm the training
                if not warned:
                    log.warning(
                        "cannot send metrics to %s (%s); training continues, they will be sent "
                        "later",
                        self.exporter.name,
                        error_summary(error),
                    )
                if ending and failed:
                    # It was already down before the end, so do not wait for it.
                    return
                delay = min(MAX_DELAY_SECONDS, max(2 * delay, POLL_SECONDS))
                failed = warned = True

    def _export_new(self) -> None:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self.exporter.export(whole_lines(data))
        self._offset += data.rfind(b"\n") + 1


class TensorBoardExporter:
    """Writes an event file, rebuilt from the first line at each start and so always complete.

    Its name ends with `run`, so that those of other runs in the same folder are left alone.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._suffix = folder, f".{run}"
        self._writer: Any = None

    def export(self, lines: Sequence[Line]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            for old in self._folder.glob(f"events.out.tfevents.*{self._suffix}"):
                old.unlink()
            # Tells a running TensorBoard to discard what it read from the old files.
            self._writer = SummaryWriter(
                str(self._folder), purge_step=0, filename_suffix=self._suffix
            )
        for line in lines:
            for name, value in metrics_of(line):
                self._writer.add_scalar(name, value, int(line["step"]), walltime=line["time"])
        self._writer.flush()

    def finish(self, status: Status) -> None:  # noqa: ARG002 - TensorBoard has no status
        self._writer.close()


class Exporters(Callback):
    """The exporters of a run, which follow the file of its metrics on rank 0."""

    def __init__(self, run_dir: Path, config: Config, dataset: Mapping[str, str]) -> None:
        """`dataset` holds the dataset's `name`, `key` and `path`."""
        exporters: list[Exporter] = []
        if config.tracking.tensorboard and is_installed("tensorboard"):
            base = config.logging.tensorboard_dir
            folder = base / run_dir.name if base else run_dir / "logs" / "tensorboard"
            own = content_key([str(run_dir.resolve())])[:16]
            exporters.append(TensorBoardExporter(folder, own))
        if config.tracking.mlflow and is_installed("mlflow"):
            exporters.append(MlflowExporter(run_dir, config, dataset))
        exporters += trackers_of(run_dir, config)
        self._followers = [Follower(run_dir, exporter) for exporter in exporters]

    def on_start(self, step: int) -> None:  # noqa: ARG002
        for follower in self._followers:
            follower.start()

    def on_end(self, status: Status, timeout_seconds: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """Wait at most `timeout_seconds` for the exporters to receive everything."""
        deadline = time.monotonic() + timeout_seconds
        started = [follower for follower in self._followers if follower.ident is not None]
        for follower in started:
            follower.end(status, deadline)
        for follower in started:
            follower.join(max(0.0, deadline - time.monotonic()) + POLL_SECONDS)
            if not follower.done:
                log.warning(
                    "%s is missing metrics; they will be sent when the run is resumed or evaluated",
                    follower.exporter.name,
                )
