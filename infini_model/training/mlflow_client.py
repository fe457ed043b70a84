"""MLflow tracking: the client, the local database and the experiment."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from infini_model.config import Config
from infini_model.runtime.storage import atomic_file, lock, make_folder, remove_leftovers

SQLITE = "sqlite:///"


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

    uri, name = config.tracking_uri, config.tracking.experiment_name
    if not uri.startswith(SQLITE):
        client = MlflowClient(uri)
        return client, _ensure_experiment(client, name, None)
    database = Path(uri.removeprefix(SQLITE))
    folder = make_folder(database.parent)
    with lock(folder / ".lock"):
        if not database.exists():
            remove_leftovers(folder, database.name)
            # Creating the tables takes seconds, and MLflow cannot open them if it is interrupted.
            with atomic_file(database) as temporary:
                MlflowClient(f"{SQLITE}{temporary}")
        client = MlflowClient(uri)
        # Artifacts go beside the database, not into the working directory of the process.
        return client, _ensure_experiment(client, name, (folder / "artifacts").resolve().as_uri())


def _ensure_experiment(client: Any, name: str, artifacts: str | None) -> str:
    """The id of the experiment `name`, created with its files at `artifacts` if missing."""
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        return str(client.create_experiment(name, artifact_location=artifacts))
    return str(experiment.experiment_id)


def error_summary(error: Exception) -> str:
    """The type and the start of the message of an error, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"
