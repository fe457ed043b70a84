"""What a stage shows in Prefect while it runs: its newest steps, and a link to MLflow."""

import logging
import threading
from pathlib import Path

import pytest
from commands import PATIENCE

from infini_model.config import load_config
from infini_model.runtime.storage import write_json
from infini_model.training.callbacks.mlflow_record import PAGE
from tasks import artifacts
from tasks.training_view import mlflow_link, table_rows

LINES = [
    {"step": 3, "train/loss": 2.5, "train/step_seconds": 2.0, "train/tokens_per_second": 1234.5},
    {"step": 3, "validation/loss": 2.75},
]


@pytest.mark.parametrize(
    ("max_steps", "shown"),
    [(10, ("3 of 10", "0:00:14")), (None, ("3", ""))],
    ids=["steps", "epochs"],
)
def test_a_step_and_its_validation_are_one_row(
    max_steps: int | None, shown: tuple[str, str]
) -> None:
    measured = {"loss": "2.5000", "validation loss": "2.7500", "tokens/s": "1,234"}
    step, eta = shown
    assert list(table_rows(LINES, max_steps)) == [{"step": step, **measured, "ETA": eta}]


def test_a_run_is_linked_once_mlflow_has_a_page_and_a_record_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def linked(*overrides: str) -> str | None:
        link = mlflow_link(tmp_path, load_config(overrides=overrides))
        return None if link is None else link.link

    server = "tracking.tracking_uri=http://mlflow:5000"
    monkeypatch.delenv(PAGE, raising=False)
    assert linked(server) is None
    write_json(tmp_path / "logs" / "mlflow.json", {"run_id": "r1", "experiment_id": "7"})
    page = "#/experiments/7/runs/r1"
    assert linked(server) == f"http://mlflow:5000/{page}"
    assert linked(server, "tracking.mlflow=false") is None
    assert linked() is None  # a database
    monkeypatch.setenv(PAGE, "http://127.0.0.1:5000")
    assert linked() == f"http://127.0.0.1:5000/{page}"


def test_a_server_that_is_gone_is_one_warning_and_harms_no_stage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(artifacts, "get_run_logger", logging.getLogger)
    monkeypatch.setattr(artifacts, "BACKOFF", 0)
    tried = threading.Semaphore(0)

    def update() -> None:
        tried.release()
        raise ConnectionError("no server")

    with caplog.at_level(logging.WARNING), artifacts.Updates("progress", update, 0.01):
        for _ in range(3):
            assert tried.acquire(timeout=PATIENCE)
    with artifacts.harmless("report"):
        raise ConnectionError("no server")
    told = [line for line in caplog.messages if "Prefect did not accept" in line]
    assert told == [
        "Prefect did not accept the progress (no server); the stage continues",
        "Prefect did not accept the report (no server); the stage continues",
    ]
