"""Where the numbers of a run go from `metrics.jsonl`: TensorBoard and MLflow.

Both are sinks that follow the file, each in a thread of its own: one that is slow or down costs the
training nothing, and gets what it missed when it is back, at the end, or when the run is next
resumed or evaluated.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from infini_model.config import Config
from infini_model.storage import lock, make_folder, write_json
from infini_model.training.metrics_file import Line, MetricsFile, read_metrics, whole_lines
from infini_model.training.system_metrics import SystemMetrics

POLL_SECONDS = 0.5
# Between two tries of a sink that fails: doubled each time up to this.
LONGEST_DELAY_SECONDS = 60.0
# How long the end of a training waits for the sinks.
PATIENCE_SECONDS = 15.0
# The most that MLflow takes in one request.
METRICS_AT_ONCE = 1000
PARAMS_AT_ONCE = 100
NOT_METRICS = ("step", "time")
SQLITE = "sqlite:///"

Status = Literal["FINISHED", "FAILED", "KILLED"]

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Something that shows the metrics; anything it raises is survived and tried again."""

    name: str

    def deliver(self, lines: Sequence[Line]) -> None:
        """Take in lines that follow those of the last call that did not raise; maybe none."""

    def finish(self, status: Status) -> None:
        """Close the record of the run, which ended as `status`."""


class Follower(threading.Thread):
    """Reads `metrics.jsonl` behind the training and delivers it to one sink."""

    def __init__(self, run_dir: Path, sink: Sink) -> None:
        super().__init__(name=f"follower of {sink.name}", daemon=True)
        self._path = run_dir / "metrics.jsonl"
        self._sink = sink
        self._offset = 0
        self._warned = False
        self._ending = threading.Event()
        self._deadline = float("inf")
        self._status: Status = "FINISHED"
        self.sink_name = sink.name
        self.done = False

    def end(self, status: Status, deadline: float) -> None:
        """Have it deliver the rest and finish, or give up at `deadline` (of time.monotonic)."""
        self._status, self._deadline = status, deadline
        self._ending.set()

    def run(self) -> None:
        """Deliver until ended; a failing sink is tried again after longer and longer delays."""
        delay, failed = 0.0, False
        while time.monotonic() < self._deadline:
            if self._ending.wait(delay) and failed:
                time.sleep(POLL_SECONDS)
            # Asked before reading: what is written before the end is set is then delivered.
            ending = self._ending.is_set()
            try:
                self._deliver_new()
                if ending:
                    self._sink.finish(self._status)
                    self.done = True
                    return
                delay, failed = POLL_SECONDS, False
            except Exception as error:  # noqa: BLE001 - no sink may harm the training
                self._warn(error)
                if ending and failed:
                    # It was down before the end already: nobody is kept waiting for it.
                    return
                delay, failed = min(LONGEST_DELAY_SECONDS, max(2 * delay, POLL_SECONDS)), True

    def _deliver_new(self) -> None:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._sink.deliver(whole_lines(data[:end]))
        self._offset += end

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            log.warning(
                "%s takes no metrics (%s); the training goes on, and they follow later",
                self._sink.name,
                _brief(error),
            )
        self._warned = True


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


class TensorBoardSink:
    """Writes event files that are made anew from the first line at each start, hence complete."""

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def deliver(self, lines: Sequence[Line]) -> None:
        """Add `lines` to the event file."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            for old in self._folder.glob("events.out.tfevents.*"):
                old.unlink()
            # A TensorBoard that has read the old files forgets them from step 0 on.
            self._writer = SummaryWriter(str(self._folder), purge_step=0)
        for line in lines:
            for name, value in _metrics_of(line):
                self._writer.add_scalar(name, value, int(line["step"]), walltime=line["time"])
        self._writer.flush()

    def finish(self, status: Status) -> None:  # noqa: ARG002 - it has no place for it
        """Close the event file."""
        self._writer.close()


def _metrics_of(line: Line) -> Iterator[tuple[str, float]]:
    return ((name, value) for name, value in line.items() if name not in NOT_METRICS)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


class MlflowSink:
    """The record of a run in MLflow; `logs/mlflow.json` remembers which one it is.

    What has arrived is asked of MLflow itself when a run is continued, so that each metric of each
    step is there once, whenever either side was killed.
    """

    name = "MLflow"

    def __init__(self, run_dir: Path, config: Config, dataset: Mapping[str, str] | None) -> None:
        self._run_dir = run_dir
        self._config = config
        self._memory = read_mlflow_record(run_dir)
        if dataset is not None:
            self._remember(dataset=dict(dataset))
        self._client: Any = None
        # The last step of each metric that MLflow holds.
        self._arrived: dict[str, int] = {}

    def deliver(self, lines: Sequence[Line]) -> None:
        """Send what MLflow does not hold yet of `lines`."""
        try:
            if self._client is None:
                self._connect()
            self._send(lines)
        except Exception:
            # Some of it may have arrived all the same; that is asked on connecting again.
            self._client = None
            raise

    def _send(self, lines: Sequence[Line]) -> None:
        from mlflow.entities import Metric

        new = [
            Metric(name, value, int(line["time"] * 1000), int(line["step"]))
            for line in lines
            for name, value in _metrics_of(line)
            if line["step"] > self._arrived.get(name, -1)
        ]
        for start in range(0, len(new), METRICS_AT_ONCE):
            batch = new[start : start + METRICS_AT_ONCE]
            self._client.log_batch(self._memory["run_id"], metrics=batch)
            self._arrived.update({metric.key: metric.step for metric in batch})
        if new:
            self._remember(delivered_step=new[-1].step)

    def finish(self, status: Status) -> None:
        """Say in MLflow how the run ended."""
        self._client.set_terminated(self._memory["run_id"], status)

    def add(self, files: Iterable[Path], metrics: Mapping[str, float]) -> None:
        """Log files, under their paths in the run folder, and metrics at the last step."""
        from mlflow.entities import Metric

        run_id, now = self._memory["run_id"], int(time.time() * 1000)
        step = self._memory.get("delivered_step", 0)
        self._client.log_batch(
            run_id, metrics=[Metric(name, value, now, step) for name, value in metrics.items()]
        )
        for file in files:
            inside = file.is_relative_to(self._run_dir)
            folder = file.relative_to(self._run_dir).parent.as_posix() if inside else "."
            self._client.log_artifact(run_id, str(file), None if folder == "." else folder)
        if self._client.get_run(run_id).info.status == "RUNNING":
            self.finish("FINISHED")

    def _connect(self) -> None:
        client, experiment_id = _open(self._config)
        run = self._find_run(client)
        if run is None:
            run = client.create_run(experiment_id, run_name=self._run_dir.name)
        else:
            client.update_run(run.info.run_id, status="RUNNING")
        self._remember(
            run_id=run.info.run_id,
            experiment=self._config.tracking.experiment_name,
            tracking_uri=self._config.tracking_uri,
        )
        self._describe(client, run)
        # Of each metric a run tells the point of the last step: one request for all of them.
        self._arrived = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        self._remember(delivered_step=max(self._arrived.values(), default=0))
        self._client = client

    def _find_run(self, client: Any) -> Any:
        """The run that this folder had before, if MLflow still has it."""
        from mlflow.exceptions import MlflowException

        if "run_id" not in self._memory:
            return None
        try:
            run = client.get_run(self._memory["run_id"])
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return run if run.info.lifecycle_stage == "active" else None

    def _describe(self, client: Any, run: Any) -> None:
        """Settings, folder and dataset; what is there already stays."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param, RunTag

        settings = _flatten(self._config.model_dump(mode="json"))
        params = [Param(k, v[:6000]) for k, v in settings if k not in run.data.params]
        for start in range(0, len(params), PARAMS_AT_ONCE):
            batch = params[start : start + PARAMS_AT_ONCE]
            client.log_batch(run.info.run_id, params=batch)
        dataset = self._memory.get("dataset")
        tags = {"run.folder": str(self._run_dir.resolve())}
        if dataset is not None:
            tags["dataset.key"] = dataset["key"]
        client.log_batch(run.info.run_id, tags=[RunTag(k, v) for k, v in tags.items()])
        if dataset is not None and not run.inputs.dataset_inputs:
            # MLflow keeps 36 characters of a digest.
            source = Dataset(dataset["name"], dataset["key"][:36], "local", dataset["path"])
            context = InputTag("mlflow.data.context", "training")
            client.log_inputs(run.info.run_id, [DatasetInput(source, [context])])

    def _remember(self, **facts: Any) -> None:
        self._memory |= facts
        write_json(self._run_dir / "logs" / "mlflow.json", self._memory)


def read_mlflow_record(run_dir: Path) -> dict[str, Any]:
    """`logs/mlflow.json`: run_id, experiment, tracking_uri, delivered_step, as far as known."""
    try:
        record: dict[str, Any] = json.loads((run_dir / "logs" / "mlflow.json").read_text("utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return record


def _quieten() -> None:
    """Have MLflow report to nobody, print nothing, and give up soon on a server that is silent."""
    for name, value in {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
        "GIT_PYTHON_REFRESH": "quiet",
    }.items():
        os.environ.setdefault(name, value)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # It would tell of every new try; the follower tells of the first.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)


def _open(config: Config) -> tuple[Any, str]:
    """A client and the id of the experiment, which is created where there is none."""
    _quieten()
    from mlflow import MlflowClient

    uri, name = config.tracking_uri, config.tracking.experiment_name
    if not uri.startswith(SQLITE):
        client = MlflowClient(uri)
        return client, _experiment(client, name, None)
    folder = make_folder(Path(uri.removeprefix(SQLITE)).parent)
    # Two that create the tables at once would both fail.
    with lock(folder / ".lock"):
        client = MlflowClient(uri)
        # Files go beside the database, not where the process happens to have been started.
        return client, _experiment(client, name, (folder / "artifacts").resolve().as_uri())


def _experiment(client: Any, name: str, artifacts: str | None) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        return str(client.create_experiment(name, artifact_location=artifacts))
    return str(experiment.experiment_id)


def log_artifacts(
    run_dir: Path, config: Config, files: Iterable[Path], metrics: Mapping[str, float]
) -> bool:
    """Add files (a report, plots) and metrics to the run's record in MLflow, and what it missed.

    Returns False, with a warning, where MLflow is not to be had; False too where it is turned off.
    """
    if not config.tracking.mlflow:
        return False
    try:
        sink = MlflowSink(run_dir, config, None)
        sink.deliver(read_metrics(run_dir))
        sink.add(files, metrics)
    except Exception as error:  # noqa: BLE001 - the files are in the run folder all the same
        log.warning("MLflow takes no files (%s); they stay in %s", _brief(error), run_dir)
        return False
    return True


class Metrics:
    """The record of a training: the file, and the sinks that follow it."""

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        dataset: Mapping[str, str],
        resumed_step: int | None,
    ) -> None:
        """`dataset` is its `name`, `key` and `path`; `resumed_step` as for `MetricsFile`."""
        self._run_dir = run_dir
        self._file = MetricsFile(run_dir, resumed_step)
        sinks: list[Sink] = []
        if config.tracking.tensorboard:
            base = config.training.tensorboard_dir
            folder = base / run_dir.name if base else run_dir / "logs" / "tensorboard"
            sinks.append(TensorBoardSink(folder))
        if config.tracking.mlflow:
            sinks.append(MlflowSink(run_dir, config, dataset))
        self.has, self.append, self.sync = self._file.has, self._file.append, self._file.sync
        self._system = SystemMetrics()
        self._followers = [Follower(run_dir, sink) for sink in sinks]
        for follower in self._followers:
            follower.start()

    @property
    def mlflow_run_id(self) -> str | None:
        """The run's record in MLflow, if it has one already."""
        return read_mlflow_record(self._run_dir).get("run_id")

    @property
    def system(self) -> dict[str, float]:
        """The last sample of this machine's load."""
        return self._system.latest

    def close(self, status: Status) -> None:
        """Wait a bounded time until the sinks have everything."""
        self._system.close()
        self._file.close()
        deadline = time.monotonic() + PATIENCE_SECONDS
        for follower in self._followers:
            follower.end(status, deadline)
        for follower in self._followers:
            follower.join(max(0.0, deadline - time.monotonic()) + POLL_SECONDS)
            if not follower.done:
                log.warning(
                    "%s has not got everything; it follows when the run is resumed or evaluated",
                    follower.sink_name,
                )
