"""The record of a run in MLflow: settings, metrics, links, and how it ended.

`logs/mlflow.json` in the run folder says which MLflow run it is and what was last reported to it,
so that a run that is continued, evaluated or cleaned up after keeps its one record.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from infini_model.config import Config
from infini_model.runtime.metrics_file import Line, metrics_of
from infini_model.runtime.storage import (
    atomic_file,
    lock,
    make_folder,
    remove_leftovers,
    write_json,
)

# The most that MLflow takes in one request.
METRICS_AT_ONCE = 1000
PARAMS_AT_ONCE = 100
# How long the end of a run waits for MLflow to hear of it, in seconds.
END_SECONDS = 5.0
SQLITE = "sqlite:///"
# Environment variable with the address of a page that shows what is tracked in a database.
PAGE = "INFINI_MLFLOW_PAGE"
SOURCE = "infini_model.training"
NOTE = "mlflow.note.content"

Status = Literal["FINISHED", "FAILED", "KILLED"]

log = logging.getLogger(__name__)


def brief(error: Exception) -> str:
    """The kind and the beginning of the message of an error, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    return record


def _path(run_dir: Path) -> Path:
    return run_dir / "logs" / "mlflow.json"


def read_mlflow_record(run_dir: Path) -> dict[str, Any]:
    """`logs/mlflow.json`, as far as known.

    It holds run_id, experiment, experiment_id, tracking_uri, delivered_step, status (RUNNING, or
    the `Status` that was last reported) and note (the description that was last written).
    """
    return _read_json(_path(run_dir))


class MlflowSink:
    """Sends metrics to the run's record, which is created where there is none.

    What has arrived is asked of MLflow itself on connecting, so that each metric of each step is
    there once, whenever either side was killed.
    """

    name = "MLflow"

    def __init__(self, run_dir: Path, config: Config, dataset: Mapping[str, str] | None) -> None:
        """`dataset` is as for `Recorder`; None is for a run that this process does not train.

        Such a run keeps its status, and the description of what trained it.
        """
        self._run_dir = run_dir
        self._config = config
        self._trains = dataset is not None
        self._memory = read_mlflow_record(run_dir)
        if dataset is not None:
            self._remember(dataset=dict(dataset))
        self._client: Any = None
        # The last step of each metric that MLflow holds.
        self._arrived: dict[str, int] = {}

    @property
    def client(self) -> Any:
        """MLflow's client; None before the first `deliver`."""
        return self._client

    @property
    def run_id(self) -> str:
        """The run in MLflow. Raises `KeyError` before the first `deliver` of a new run."""
        return str(self._memory["run_id"])

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
            for name, value in metrics_of(line)
            if line["step"] > self._arrived.get(name, -1)
        ]
        for start in range(0, len(new), METRICS_AT_ONCE):
            batch = new[start : start + METRICS_AT_ONCE]
            self._client.log_batch(self.run_id, metrics=batch)
            self._arrived.update({metric.key: metric.step for metric in batch})
        if new:
            self._remember(delivered_step=new[-1].step)

    def finish(self, status: Status) -> None:
        """Report how the run ended."""
        self._client.set_terminated(self.run_id, status)
        self._remember(status=status)

    def settle(self, status: Status) -> None:
        """Correct the status of a run that ended without reporting it; `status` is the truth.

        An interrupted run that is FAILED or KILLED already stays so: why it ended is known there.
        """
        reported = self._client.get_run(self.run_id).info.status
        if reported == "RUNNING" or (status == "FINISHED" and reported != status):
            self.finish(status)

    def _connect(self) -> None:
        client, experiment = open_tracking(self._config)
        run = self._find_run(client)
        is_new = run is None
        if is_new:
            run = client.create_run(experiment, run_name=self._run_dir.name)
        elif self._trains:
            client.update_run(run.info.run_id, status="RUNNING")
        if is_new or self._trains:
            self._remember(status="RUNNING")
        self._remember(
            run_id=run.info.run_id,
            experiment=self._config.tracking.experiment_name,
            experiment_id=run.info.experiment_id,
            tracking_uri=self._config.tracking_uri,
        )
        if is_new or self._trains:
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
            run = client.get_run(self.run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return run if run.info.lifecycle_stage == "active" else None

    def _describe(self, client: Any, run: Any) -> None:
        """Record settings, origin and dataset; parameters that are there already stay."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param, RunTag

        settings = _flatten(self._config.model_dump(mode="json"))
        params = [Param(k, v[:6000]) for k, v in settings if k not in run.data.params]
        for start in range(0, len(params), PARAMS_AT_ONCE):
            batch = params[start : start + PARAMS_AT_ONCE]
            client.log_batch(run.info.run_id, params=batch)
        tags = self._origin()
        note = self._note(tags)
        # What somebody wrote there on MLflow's page is theirs.
        if run.data.tags.get(NOTE) in (None, self._memory.get("note")):
            tags[NOTE] = note
        client.log_batch(run.info.run_id, tags=[RunTag(k, v) for k, v in tags.items()])
        self._remember(note=note)
        dataset = self._memory.get("dataset")
        if dataset is not None and not run.inputs.dataset_inputs:
            # MLflow keeps 36 characters of a digest.
            source = Dataset(dataset["name"], dataset["key"][:36], "local", dataset["path"])
            context = InputTag("mlflow.data.context", "training")
            client.log_inputs(run.info.run_id, [DatasetInput(source, [context])])

    def _origin(self) -> dict[str, str]:
        """Tags that say what trained the run, on what, and where it is; MLflow's own names first.

        Prefect's flow run is the one that last claimed the run folder, see
        `infini_model.runtime.runs`.
        """
        from mlflow.utils.git_utils import get_git_commit

        dataset = self._memory.get("dataset", {})
        owner = _read_json(self._run_dir / "run.json").get("owner") or {}
        tags = {
            "mlflow.user": _user(),
            "mlflow.source.name": SOURCE,
            "mlflow.source.type": "LOCAL",
            "mlflow.source.git.commit": get_git_commit(str(Path(__file__).resolve())),
            "run.folder": str(self._run_dir.resolve()),
            "run.preset": self._config.run.preset,
            "dataset.key": dataset.get("key"),
            "dataset.folder": dataset.get("path"),
            "prefect.flow_run_id": owner.get("id"),
            "prefect.flow_run_url": owner.get("url"),
        }
        return {name: value for name, value in tags.items() if value}

    def _note(self, tags: Mapping[str, str]) -> str:
        """The description on MLflow's page, in Markdown."""
        lines = [f"Run folder: `{tags['run.folder']}`"]
        if folder := tags.get("dataset.folder"):
            lines.append(f"Dataset: `{folder}`")
        if url := tags.get("prefect.flow_run_url"):
            lines.append(f"Flow run in Prefect: [{tags['prefect.flow_run_id']}]({url})")
        return "\n\n".join(lines)

    def _remember(self, **facts: Any) -> None:
        self._memory |= facts
        write_json(_path(self._run_dir), self._memory)


def _user() -> str | None:
    # In a container the user may have no name.
    with contextlib.suppress(KeyError, OSError):
        return getpass.getuser()
    return None


def _quieten() -> None:
    """Have MLflow report to nobody, print nothing, and give up soon on a server that is silent."""
    for name, value in {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
        "GIT_PYTHON_REFRESH": "quiet",
    }.items():
        os.environ.setdefault(name, value)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # It would tell of every new try; the follower tells of the first.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)


def open_tracking(config: Config) -> tuple[Any, str]:
    """A client and the id of the experiment, which is created where there is none."""
    _quieten()
    from mlflow import MlflowClient

    uri, name = config.tracking_uri, config.tracking.experiment_name
    if not uri.startswith(SQLITE):
        client = MlflowClient(uri)
        return client, ensure_experiment(client, name, None)
    database = Path(uri.removeprefix(SQLITE))
    folder = make_folder(database.parent)
    with lock(folder / ".lock"):
        if not database.exists():
            remove_leftovers(folder, database.name)
            # MLflow cannot open tables whose creation, which takes seconds, was interrupted.
            with atomic_file(database) as temporary:
                MlflowClient(f"{SQLITE}{temporary}")
        client = MlflowClient(uri)
        # Files go beside the database, not where the process happens to have been started.
        return client, ensure_experiment(client, name, (folder / "artifacts").resolve().as_uri())


def ensure_experiment(client: Any, name: str, artifacts: str | None) -> str:
    """The id of the experiment `name`; if missing it is created, with its files at `artifacts`."""
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        return str(client.create_experiment(name, artifact_location=artifacts))
    return str(experiment.experiment_id)


def run_url(base: str, run_dir: Path) -> str | None:
    """The page of a run on the MLflow server at `base`; None where it has no record yet."""
    record = read_mlflow_record(run_dir)
    if "run_id" not in record or "experiment_id" not in record:
        return None
    return f"{base.rstrip('/')}/#/experiments/{record['experiment_id']}/runs/{record['run_id']}"


def end_record(run_dir: Path, status: Status, *, timeout_seconds: float = END_SECONDS) -> bool:
    """Set the status of a run whose training could not: it was killed, or MLflow was down.

    Only a record that is RUNNING is changed, and where the training has reported its end nothing is
    even imported. Never raises. Gives up after `timeout_seconds`, to which the first import of
    MLflow in a process adds seconds. Returns whether the status was changed.
    """
    record = read_mlflow_record(run_dir)
    if "run_id" not in record or record.get("status", "RUNNING") != "RUNNING":
        return False
    ended: list[bool] = []

    def end() -> None:
        try:
            ended.append(_end(run_dir, record, status))
        except Exception as error:  # noqa: BLE001 - the run has ended, whether MLflow knows or not
            log.warning("MLflow does not take the end of %s (%s)", run_dir.name, brief(error))

    _quieten()
    # Not inside the time limit, which is for a server that is down.
    with contextlib.suppress(ImportError):
        import mlflow  # noqa: F401
    # A request to a server that hangs takes minutes; the thread is left to it.
    thread = threading.Thread(target=end, name=f"end of {run_dir.name}", daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    return any(ended)


def _end(run_dir: Path, record: Mapping[str, Any], status: Status) -> bool:
    from mlflow import MlflowClient

    client = MlflowClient(record["tracking_uri"])
    reported = client.get_run(record["run_id"]).info.status
    if reported == "RUNNING":
        client.set_terminated(record["run_id"], status)
    now = {"status": status if reported == "RUNNING" else reported}
    write_json(_path(run_dir), dict(record) | now)
    return bool(reported == "RUNNING")
