"""The record of a run in MLflow: settings, metrics, links and final status.

`logs/mlflow.json` in the run folder names the MLflow run and what was last reported to it, so that
a run that is resumed, evaluated or cleaned up keeps the same record.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infini_model.config import Config, leaves
from infini_model.runtime.holders import flow_run_page
from infini_model.runtime.metrics_file import Line, metrics_of, read_metrics
from infini_model.runtime.runs import INITIAL_WEIGHTS, is_started, read_run
from infini_model.runtime.storage import (
    atomic_file,
    lock,
    make_folder,
    read_json_or_empty,
    remove_leftovers,
    write_json,
)
from infini_model.training.callbacks import Status

# MLflow's limit of the digest of a dataset, in characters.
DIGEST_LENGTH = 36
# How long `end_record` waits for MLflow, in seconds.
END_SECONDS = 5.0
# Environment variable: address of an MLflow page that shows a local tracking database.
PAGE = "INFINI_MLFLOW_PAGE"
SQLITE = "sqlite:///"
SOURCE = "infini_model.training"
RECORD = "logs/mlflow.json"
NOTE = "mlflow.note.content"

log = logging.getLogger(__name__)


def quiet_mlflow() -> None:
    """Turn off MLflow's console output, and shorten its timeouts and retries."""
    for name, value in {
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
        "GIT_PYTHON_REFRESH": "quiet",
    }.items():
        os.environ.setdefault(name, value)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # It logs every retry; the follower of the metrics already warns about the first failure.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)


def open_tracking(config: Config) -> tuple[Any, str]:
    """A client and the id of the experiment, which is created if missing."""
    quiet_mlflow()
    from mlflow import MlflowClient

    uri, name, artifacts = config.tracking_uri, config.tracking.experiment_name, None
    with contextlib.ExitStack() as stack:
        if uri.startswith(SQLITE):
            from sqlalchemy import make_url

            address = make_url(uri)
            database = Path(address.database or "")
            folder = make_folder(database.parent)
            stack.enter_context(lock(folder / ".lock"))
            if not database.exists():
                remove_leftovers(folder, database.name)
                # Creating the tables takes seconds, and MLflow cannot open half of them.
                with atomic_file(database) as temporary:
                    MlflowClient(str(address.set(database=str(temporary))))
            # Beside the database, not in the working directory of the process.
            artifacts = (folder / "artifacts").resolve().as_uri()
        client = MlflowClient(uri)
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            return client, str(client.create_experiment(name, artifact_location=artifacts))
        return client, str(experiment.experiment_id)


def error_summary(error: Exception) -> str:
    """The type and the start of the message of an error, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


def read_mlflow_record(run_dir: Path) -> dict[str, Any]:
    """The contents of `logs/mlflow.json`; empty if it is missing or unreadable.

    It holds run_id, experiment_id, tracking_uri, status (RUNNING, or the last reported `Status`),
    note (the last description written) and dataset.
    """
    return read_json_or_empty(run_dir / RECORD)


class MlflowExporter:
    """Sends metrics to the run's record, which is created if missing.

    On connecting, MLflow is queried for the metrics it already has, so each metric of each step is
    recorded exactly once, even if either side was killed.
    """

    name = "MLflow"

    def __init__(self, run_dir: Path, config: Config, dataset: Mapping[str, str] | None) -> None:
        """`dataset` is as for `Exporters`; None if this process does not train the run.

        Then the run keeps its status and its description.
        """
        self._run_dir = run_dir
        self._config = config
        self._trains = dataset is not None
        self._record = read_mlflow_record(run_dir)
        if dataset is not None:
            self._update_record(dataset=dict(dataset))
        # MLflow's client; None before the first `export`, and after one that failed.
        self.client: Any = None
        # The last step in MLflow, by metric.
        self._delivered: dict[str, int] = {}

    @property
    def run_id(self) -> str:
        """The run in MLflow. Raises `KeyError` before the first `export` of a new run."""
        return str(self._record["run_id"])

    def export(self, lines: Sequence[Line]) -> None:
        """Send those metrics in `lines` that MLflow does not have yet."""
        try:
            if self.client is None:
                self._connect()
                # All of them: a record that was deleted meanwhile is a new one.
                lines = read_metrics(self._run_dir)
            from mlflow.entities import Metric

            new = [
                Metric(name, value, int(line["time"] * 1000), int(line["step"]))
                for line in lines
                for name, value in metrics_of(line)
                if line["step"] > self._delivered.get(name, -1)
            ]
            self.client.log_batch(self.run_id, metrics=new)
            self._delivered.update({metric.key: metric.step for metric in new})
        except Exception:
            # Some metrics may have arrived; reconnecting queries MLflow for them.
            self.client = None
            raise

    def finish(self, status: Status) -> None:
        self.client.set_terminated(self.run_id, status)
        self._update_record(status=status)

    def correct_status(self, status: Status) -> None:
        """Set the actual `status` of a run that ended without reporting it.

        An interrupted run that is already FAILED or KILLED keeps that status.
        """
        reported = self.client.get_run(self.run_id).info.status
        if reported == "RUNNING" or (status == "FINISHED" and reported != status):
            self.finish(status)

    def _connect(self) -> None:
        client, experiment = open_tracking(self._config)
        run = self._find_run(client)
        begins = run is None or self._trains
        if run is None:
            run = client.create_run(experiment, run_name=self._run_dir.name)
        elif self._trains:
            client.update_run(run.info.run_id, status="RUNNING")
        self._update_record(
            **({"status": "RUNNING"} if begins else {}),
            run_id=run.info.run_id,
            experiment_id=run.info.experiment_id,
            tracking_uri=self._config.tracking_uri,
        )
        if begins:
            self._describe(client, run)
        # A run includes the last point of each metric, so one request is enough.
        self._delivered = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        self.client = client

    def _find_run(self, client: Any) -> Any:
        """The MLflow run recorded for this folder, if it still exists."""
        from mlflow.exceptions import MlflowException

        if "run_id" not in self._record:
            return None
        try:
            run = client.get_run(self.run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return run if run.info.lifecycle_stage == "active" else None

    def _describe(self, client: Any, run: Any) -> None:
        """Record settings, origin and dataset; existing parameters are kept."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param, RunTag

        settings = leaves(self._config.model_dump(mode="json"))
        params = [Param(k, str(v)[:6000]) for k, v in settings if k not in run.data.params]
        tags = self._origin()
        flow_run = tags.get("prefect.flow_run_id")
        # A description edited by a user in MLflow's UI, where it is Markdown, is kept.
        is_own = run.data.tags.get(NOTE) in (None, self._record.get("note"))
        if is_own and flow_run and (page := flow_run_page(flow_run)):
            tags[NOTE] = f"Flow run in Prefect: [{flow_run}]({page})"
        run_tags = [RunTag(k, v) for k, v in tags.items()]
        client.log_batch(run.info.run_id, params=params, tags=run_tags)
        self._update_record(note=tags.get(NOTE, self._record.get("note")))
        dataset = self._record.get("dataset")
        if dataset is not None and not run.inputs.dataset_inputs:
            digest = dataset["key"][:DIGEST_LENGTH]
            source = Dataset(dataset["name"], digest, "local", dataset["path"])
            context = InputTag("mlflow.data.context", "training")
            client.log_inputs(run.info.run_id, [DatasetInput(source, [context])])

    def _origin(self) -> dict[str, str]:
        """Tags beside the parameters: what trained the run, from what, and in which folder.

        The Prefect flow run is the one that last claimed the run folder, see
        `infini_model.runtime.runs`.
        """
        from mlflow.tracking.context.registry import resolve_tags
        from mlflow.utils.git_utils import get_git_commit

        record = read_run(self._run_dir) if is_started(self._run_dir) else None
        weights = read_json_or_empty(self._run_dir / INITIAL_WEIGHTS)
        tags = {
            "mlflow.source.name": SOURCE,
            "mlflow.source.git.commit": get_git_commit(str(Path(__file__).resolve())),
            "run.folder": str(self._run_dir.resolve()),
            "initial_weights.commit": weights.get("commit"),
            "initial_weights.fingerprint": weights.get("fingerprint"),
            "prefect.flow_run_id": record and record.owner,
            "branch.parent": record and record.parent,
            "branch.parent_step": record and record.parent_step,
        }
        return {name: str(value) for name, value in resolve_tags(tags).items() if value}

    def _update_record(self, **fields: Any) -> None:
        self._record |= fields
        write_json(self._run_dir / RECORD, self._record)


def page_url(base: str, experiment: str, run: str = "") -> str:
    """The page of a run, or of all runs of an experiment, on the MLflow server at `base`.

    Without the workflow type, it opens on pages for LLM traces, which stay empty.
    """
    runs = f"runs/{run}" if run else "runs"
    page = f"{base.rstrip('/')}/#/experiments/{experiment}/{runs}"
    return f"{page}?workflowType=machine_learning"


def run_url(page: str | None, run_dir: Path) -> str | None:
    """The page of a run in MLflow; None if it has none, or no record yet.

    A database has no page; `page` is the server that shows it, if one does.
    """
    record = read_mlflow_record(run_dir)
    uri = str(record.get("tracking_uri", ""))
    base = uri if uri.startswith("http") else page
    if base is None or "run_id" not in record:
        return None
    return page_url(base, record["experiment_id"], record["run_id"])


def end_record(run_dir: Path, status: Status, *, timeout_seconds: float = END_SECONDS) -> bool:
    """Set the status of a run whose training was killed or could not reach MLflow.

    Changes only a record that is RUNNING; if the training has reported its end, MLflow is not even
    imported. Never raises. Times out after `timeout_seconds`, not counting the first import of
    MLflow in the process. Returns whether the status was changed.
    """
    record = read_mlflow_record(run_dir)
    if "run_id" not in record or record.get("status", "RUNNING") != "RUNNING":
        return False
    ended: list[bool] = []

    def end() -> None:
        try:
            from mlflow import MlflowClient

            client = MlflowClient(record["tracking_uri"])
            reported = client.get_run(record["run_id"]).info.status
            if reported == "RUNNING":
                client.set_terminated(record["run_id"], status)
            now = status if reported == "RUNNING" else reported
            write_json(run_dir / RECORD, record | {"status": now})
            ended.append(reported == "RUNNING")
        except Exception as error:  # noqa: BLE001 - the run has ended, whether MLflow knows or not
            name, reason = run_dir.name, error_summary(error)
            log.warning("cannot set the final status of %s in MLflow (%s)", name, reason)

    quiet_mlflow()
    # Outside the timeout, which is for a server that is down.
    with contextlib.suppress(ImportError):
        import mlflow  # noqa: F401
    # A request to a hanging server takes minutes; the daemon thread is abandoned.
    thread = threading.Thread(target=end, name=f"end of {run_dir.name}", daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    return any(ended)
