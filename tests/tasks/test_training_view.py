"""The table of a running training's newest steps."""

from pathlib import Path

import pytest

from infini_model.config import Config, load_config
from infini_model.runtime.storage import write_json
from infini_model.training.callbacks.mlflow_record import PAGE
from tasks.training_view import mlflow_link, table_rows

LINES = [
    {"step": 3, "train/loss": 2.5, "train/step_seconds": 2.0, "train/tokens_per_second": 1234.5},
    {"step": 3, "validation/loss": 2.75},
]
MEASURED = {"loss": "2.5000", "validation loss": "2.7500", "tokens/s": "1,234"}


def test_a_step_and_its_validation_are_one_row() -> None:
    assert list(table_rows(LINES, 10)) == [{"step": "3 of 10", **MEASURED, "ETA": "0:00:14"}]


def test_without_a_known_number_of_steps_there_is_no_total() -> None:
    assert list(table_rows(LINES, None)) == [{"step": "3", **MEASURED, "ETA": ""}]


def shown(run_dir: Path, *overrides: str) -> str | None:
    config: Config = load_config(overrides=overrides)
    link = mlflow_link(run_dir, config)
    return None if link is None else link.link


def test_a_run_is_linked_once_mlflow_has_a_page_and_a_record_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = "tracking.tracking_uri=http://mlflow:5000"
    monkeypatch.delenv(PAGE, raising=False)
    assert shown(tmp_path, server) is None
    write_json(tmp_path / "logs" / "mlflow.json", {"run_id": "r1", "experiment_id": "7"})
    page = "#/experiments/7/runs/r1"
    assert shown(tmp_path, server) == f"http://mlflow:5000/{page}"
    assert shown(tmp_path, server, "tracking.mlflow=false") is None
    assert shown(tmp_path) is None  # a database
    monkeypatch.setenv(PAGE, "http://127.0.0.1:5000")
    assert shown(tmp_path) == f"http://127.0.0.1:5000/{page}"
