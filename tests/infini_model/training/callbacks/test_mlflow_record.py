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


def test_the_status_follows_a_run_through_stop_resume_and_end(tmp_path, config):
    metrics = begin(tmp_path, config)
    assert status(tmp_path) == "RUNNING"
    metrics.close("KILLED")
    assert status(tmp_path) == "KILLED"
    again = begin(tmp_path, config, resumed_step=1)
    assert status(tmp_path) == "RUNNING"
    again.close("FINISHED")
    assert status(tmp_path) == "FINISHED"
    assert not end_record(tmp_path, "FAILED")
    assert status(tmp_path) == "FINISHED"


def test_an_unreported_end_is_reported_once(tmp_path, config):
    begin(tmp_path, config)
    assert end_record(tmp_path, "FAILED")
    assert status(tmp_path) == "FAILED"
    assert not end_record(tmp_path, "KILLED")
    assert status(tmp_path) == "FAILED"


def test_a_status_that_mlflow_already_has_is_kept(tmp_path, config):
    metrics = begin(tmp_path, config)
    record = read_mlflow_record(tmp_path)
    metrics.close("FINISHED")
    # As if the training had been killed between reporting to MLflow and recording it.
    write_json(tmp_path / "logs" / "mlflow.json", record)
    assert not end_record(tmp_path, "FAILED")
    assert status(tmp_path) == "FINISHED"


def test_an_end_without_a_record_is_ignored(tmp_path):
    assert not end_record(tmp_path, "FAILED")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("listens", [True, False], ids=["hangs", "down"])
def test_an_unresponsive_server_does_not_block_end_record(tmp_path, listens, monkeypatch):
    # Longer than the test may take: it is not the client that gives up.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", str(int(10 * PATIENCE)))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        if not listens:
            silent.close()
        record = {"run_id": "r" * 32, "tracking_uri": f"http://127.0.0.1:{port}"}
        write_json(tmp_path / "logs" / "mlflow.json", record | {"status": "RUNNING"})
        assert not end_record(tmp_path, "FAILED", timeout_seconds=1.0)


@pytest.mark.story
def test_a_killed_trainer_is_failed_in_mlflow_before_the_launcher_returns(
    dataset, make_config, output, tmp_path, monkeypatch
):
    run_dir = tmp_path / "run"
    config = make_config(
        run={"output_dir": str(output)},
        training={"max_steps": 100_000},
        logging={"eval_steps": 50_000},
        checkpoint={"save_steps": 50_000},
        tracking={"mlflow": True, "tensorboard": False},
    )

    monkeypatch.setattr(launcher, "end_record", end_record)

    def kill(_line):
        if delivered(run_dir) is not None:
            for process in trainers(run_dir):
                process.kill()

    with pytest.raises(Crashed):
        launch(config, dataset, run_dir, on_line=kill)
    assert status(run_dir) == "FAILED"


def test_a_run_is_tagged_with_its_origin(tmp_path, config):
    flow_run = {"id": "0198c0de", "url": "http://127.0.0.1:4200/runs/flow-run/0198c0de"}
    write_json(tmp_path / "run.json", {"owner": flow_run})
    begin(tmp_path, config).close("KILLED")
    tags = in_mlflow(tmp_path).data.tags
    assert tags["prefect.flow_run_id"] == flow_run["id"]
    assert tags["prefect.flow_run_url"] == flow_run["url"]
    assert tags["run.folder"] == str(tmp_path)
    assert tags["run.preset"] == "debug"
    assert (tags["dataset.key"], tags["dataset.folder"]) == (DATASET["key"], DATASET["path"])
    assert {"mlflow.user", "mlflow.source.name", "mlflow.source.type"} <= set(tags)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    assert tags.get("mlflow.source.git.commit", "") == head
    assert f"]({flow_run['url']})" in tags[NOTE]
    assert str(tmp_path) in tags[NOTE]


def test_the_links_follow_a_resume_and_an_edited_description_is_kept(tmp_path, config):
    from mlflow import MlflowClient

    urls = [f"http://127.0.0.1:4200/runs/flow-run/{number}" for number in range(3)]
    for step, url in enumerate(urls[:2]):
        write_json(tmp_path / "run.json", {"owner": {"id": url[-1], "url": url}})
        begin(tmp_path, config, step or None).close("KILLED")
        tags = in_mlflow(tmp_path).data.tags
        assert tags["prefect.flow_run_url"] == url
        assert f"]({url})" in tags[NOTE]
    record = read_mlflow_record(tmp_path)
    MlflowClient(record["tracking_uri"]).set_tag(record["run_id"], NOTE, "The one to keep.")
    write_json(tmp_path / "run.json", {"owner": {"id": "2", "url": urls[2]}})
    begin(tmp_path, config, 2).close("FINISHED")
    tags = in_mlflow(tmp_path).data.tags
    assert tags["prefect.flow_run_url"] == urls[2]
    assert tags[NOTE] == "The one to keep."


def test_the_page_of_a_run_and_of_its_experiment(tmp_path, config):
    assert run_url("http://127.0.0.1:5000", tmp_path) is None
    number = open_tracking(config)[1]
    assert open_tracking(config)[1] == number
    begin(tmp_path, config).close("FINISHED")
    run = in_mlflow(tmp_path).info
    assert run.experiment_id == number
    page = f"http://127.0.0.1:5000/#/experiments/{number}/runs/{run.run_id}"
    assert run_url("http://127.0.0.1:5000/", tmp_path) == page


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
