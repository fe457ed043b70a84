"""The record of a run in MLflow: its final status and its origin."""

import functools
import os
import signal
import socket
import subprocess
import sys

import pytest
from commands import PATIENCE, eventually, run
from records import Record
from trainings import trainers

from infini_model.runtime.storage import write_json
from infini_model.training.callbacks import mlflow_record
from infini_model.training.callbacks.mlflow_record import (
    NOTE,
    read_mlflow_record,
    run_url,
)
from infini_model.training.launch import launcher
from infini_model.training.launch.failures import Crashed
from infini_model.training.launch.launcher import launch
from infini_model.training.mlflow_client import open_tracking

DATASET = {"name": "corpus", "key": "d" * 64, "path": "/data/corpus"}
end_record = functools.partial(mlflow_record.end_record, timeout_seconds=PATIENCE)


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """An output folder shared by all runs, as creating MLflow's tables takes seconds."""
    return tmp_path_factory.mktemp("output")


@pytest.fixture
def config(make_config, output):
    return make_config(
        run={"preset": "debug", "output_dir": str(output)},
        tracking={"mlflow": True, "tensorboard": False},
    )


def in_mlflow(run_dir):
    """The run in MLflow."""
    from mlflow import MlflowClient

    record = read_mlflow_record(run_dir)
    return MlflowClient(record["tracking_uri"]).get_run(record["run_id"])


def status(run_dir):
    return in_mlflow(run_dir).info.status


def begin(run_dir, config, resumed_step=None):
    """The record of a training that has taken a step, delivered to MLflow."""
    metrics = Record(run_dir, config, DATASET, resumed_step)
    metrics.append((resumed_step or 0) + 1, {"train/loss": 1.0})
    eventually(lambda: delivered(run_dir) == (resumed_step or 0) + 1, "the metrics")
    return metrics


def delivered(run_dir):
    return read_mlflow_record(run_dir).get("delivered_step")


def test_the_end_of_a_killed_training_is_reported_once(tmp_path, config):
    begin(tmp_path, config)
    assert status(tmp_path) == "RUNNING"
    assert end_record(tmp_path, "FAILED")
    assert status(tmp_path) == "FAILED"
    assert not end_record(tmp_path, "KILLED")
    assert status(tmp_path) == "FAILED"


def test_the_status_follows_a_run_through_a_stop_a_resume_and_its_end(tmp_path, config):
    begin(tmp_path, config).close("KILLED")
    assert status(tmp_path) == "KILLED"
    again = begin(tmp_path, config, resumed_step=1)
    assert status(tmp_path) == "RUNNING"
    record = read_mlflow_record(tmp_path)
    again.close("FINISHED")
    # As if it had been killed between reporting to MLflow and recording it.
    write_json(tmp_path / "logs" / "mlflow.json", record)
    assert not end_record(tmp_path, "FAILED")
    assert status(tmp_path) == "FINISHED"


def test_the_end_of_a_run_without_a_record_is_ignored(tmp_path):
    assert not end_record(tmp_path, "FAILED")
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_hangs_does_not_block_the_end(tmp_path, monkeypatch):
    # Longer than the test may take: it is not the client that gives up.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", str(int(10 * PATIENCE)))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        record = {"run_id": "r" * 32, "tracking_uri": uri, "status": "RUNNING"}
        write_json(tmp_path / "logs" / "mlflow.json", record)
        assert not end_record(tmp_path, "FAILED", timeout_seconds=1.0)


@pytest.mark.story
def test_a_killed_trainer_is_failed_in_mlflow_before_the_launcher_returns(
    dataset, make_config, output, tmp_path, monkeypatch
):
    config = make_config(
        run={"output_dir": str(output)},
        training={"max_steps": 100_000},
        logging={"eval_steps": 50_000},
        checkpoint={"save_steps": 50_000},
        tracking={"mlflow": True, "tensorboard": False},
    )
    monkeypatch.setattr(launcher, "end_record", end_record)

    def kill(_line):
        if delivered(tmp_path) is not None:
            for process in trainers(tmp_path):
                process.kill()

    with pytest.raises(Crashed):
        launch(config, dataset, tmp_path, on_line=kill)
    assert status(tmp_path) == "FAILED"


def test_a_run_is_described_with_its_origin_settings_and_page(tmp_path, config):
    flow_run = {"id": "0198c0de", "url": "http://127.0.0.1:4200/runs/flow-run/0198c0de"}
    write_json(tmp_path / "run.json", {"owner": flow_run})
    assert run_url("http://127.0.0.1:5000", tmp_path) is None
    number = open_tracking(config)[1]
    begin(tmp_path, config).close("KILLED")
    found = in_mlflow(tmp_path)
    page = f"http://127.0.0.1:5000/#/experiments/{number}/runs/{found.info.run_id}"
    assert run_url("http://127.0.0.1:5000/", tmp_path) == page
    assert found.data.params["training.max_steps"] == "12"
    assert found.inputs.dataset_inputs[0].dataset.digest == DATASET["key"][:36]
    tags = found.data.tags
    assert tags["prefect.flow_run_id"] == flow_run["id"]
    assert tags["run.folder"] == str(tmp_path)
    assert tags["run.preset"] == "debug"
    assert (tags["dataset.key"], tags["dataset.folder"]) == (DATASET["key"], DATASET["path"])
    assert {"mlflow.user", "mlflow.source.name", "mlflow.source.type"} <= set(tags)
    git = ["git", "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    assert tags.get("mlflow.source.git.commit", "") == head
    assert str(tmp_path) in tags[NOTE]


def test_the_links_follow_a_resume_and_an_edited_description_is_kept(tmp_path, config):
    from mlflow import MlflowClient

    for step in range(3):
        url = f"http://127.0.0.1:4200/runs/flow-run/{step}"
        write_json(tmp_path / "run.json", {"owner": {"id": str(step), "url": url}})
        begin(tmp_path, config, step or None).close("KILLED")
        tags = in_mlflow(tmp_path).data.tags
        assert tags["prefect.flow_run_url"] == url
        if step < 2:
            assert f"]({url})" in tags[NOTE]
        if step == 1:
            record = read_mlflow_record(tmp_path)
            client = MlflowClient(record["tracking_uri"])
            client.set_tag(record["run_id"], NOTE, "The one to keep.")
    assert tags[NOTE] == "The one to keep."


def test_a_kill_while_the_tables_are_created_is_recovered_from(make_config):
    config = make_config()
    folder = config.run.output_dir / "mlflow"
    # It kills itself when some of the tables exist, but not all.
    program = """
import json, os, signal, sys
from sqlalchemy import event
from sqlalchemy.engine import Engine
from infini_model.config import validate
from infini_model.training.mlflow_client import open_tracking
tables = []
@event.listens_for(Engine, "after_cursor_execute")
def kill(connection, cursor, statement, *rest):
    tables.extend([statement] * ("CREATE TABLE" in statement))
    if len(tables) == 8:
        os.kill(os.getpid(), signal.SIGKILL)
open_tracking(validate(json.loads(sys.argv[1])))
"""
    killed = run([sys.executable, "-c", program, config.model_dump_json()], dict(os.environ))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert list(folder.glob(".tmp-*"))
    assert not (folder / "mlflow.db").exists()
    assert int(open_tracking(config)[1]) > 0
    assert not list(folder.glob(".tmp-*"))
