"""The metrics of a run: a file, and exporters that follow it and may be slow, silent or down.

The record in MLflow, here in a file, has the status and the origin of the run, too.
"""

import errno
import functools
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
from commands import PATIENCE, eventually, run
from records import Record

from infini_model.runtime.metrics_file import MetricsFile, read_metrics, read_newest
from infini_model.runtime.records import write_record
from infini_model.runtime.runs import RUN, RunRecord
from infini_model.runtime.storage import write_json
from infini_model.training import mlflow_record
from infini_model.training.callbacks import Callbacks
from infini_model.training.metrics import Recorder
from infini_model.training.mlflow_record import (
    NOTE,
    MlflowExporter,
    open_tracking,
    read_mlflow_record,
    run_url,
)
from infini_model.training.tracking import Follower, TensorBoardExporter

DATASET = {"name": "corpus", "key": "d" * 64, "path": "/data/corpus"}
end_record = functools.partial(mlflow_record.end_record, timeout_seconds=PATIENCE)
NAMES = (
    "train/loss",
    "train/grad_norm",
    *(f"memory/layer_{i}/read_weight_mean" for i in range(10)),
)


def write(run_dir, steps, resumed_step=None):
    file = MetricsFile(run_dir, resumed_step)
    for step in steps:
        file.append(step, {"train/loss": 10.0 - step})
    file.close()


def test_each_step_is_in_the_file_once_whatever_the_training_was_interrupted_by(tmp_path):
    write(tmp_path, range(1, 8))
    # After a kill: half a line, and steps after the checkpoint, which are repeated.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "train/lo')
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 8))
    write(tmp_path, range(5, 10), resumed_step=4)
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 10))
    # A training from scratch.
    write(tmp_path, [0])
    assert [line["step"] for line in read_metrics(tmp_path)] == [0]


def test_the_newest_values_are_found_however_far_back_they_are(tmp_path):
    assert read_newest(tmp_path, "step") == {}
    lines = [{"step": 1, "validation/loss": 7.5}]
    lines += [{"step": step, "train/loss": 1 / step} for step in range(2, 20_001)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 20001, "trai')
    newest = read_newest(tmp_path, "step", "train/loss", "validation/loss", "test/loss")
    assert newest == {"step": 20_000, "train/loss": 1 / 20_000, "validation/loss": 7.5}


def test_the_exporters_hear_of_an_end_by_a_full_disk(caplog):
    heard = []

    def fail():
        raise OSError(errno.ENOSPC, "what the file has buffered cannot be written")

    callbacks = Callbacks(
        [Recorder(SimpleNamespace(close=fail), 1), SimpleNamespace(on_end=heard.append)]
    )
    with caplog.at_level(logging.ERROR):
        callbacks.end("FAILED")
    assert heard == ["FAILED"]
    assert "Recorder failed at the end of the training: OSError(28, 'what" in caplog.text


def test_an_exporter_that_stays_down_is_warned_of_once_and_does_not_delay_the_end(tmp_path, caplog):
    tried = threading.Event()

    def refuse(lines):
        tried.set()
        raise ConnectionError("connection refused")

    write(tmp_path, range(1, 6))
    follower = Follower(tmp_path, SimpleNamespace(name="Down", export=refuse))
    with caplog.at_level(logging.WARNING):
        follower.start()
        # The run ends once the exporter has been tried, and may take forever to finish.
        assert tried.wait(PATIENCE)
        follower.end("FINISHED", math.inf)
        follower.join(PATIENCE)
    assert not follower.is_alive()
    assert not follower.done
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_tensorboard_has_each_step_once_across_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "tensorboard"
    folder.mkdir()
    foreign = [folder / f"events.out.tfevents.1.host.2.0{name}" for name in ("", ".other")]
    for file in foreign:
        file.touch()
    write(tmp_path, range(1, 8))
    for resumed_step, steps in ((None, range(1, 8)), (4, range(5, 10))):
        write(tmp_path, steps, resumed_step)
        exporter = TensorBoardExporter(folder, "own")
        exporter.export(read_metrics(tmp_path))
        exporter.finish("FINISHED")
    assert all(file.exists() for file in foreign)
    assert len([*folder.iterdir()]) == 3
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (step, 10.0 - step) for step in range(1, 10)
    ]


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """An output folder shared by all runs, as creating MLflow's tables takes seconds."""
    return tmp_path_factory.mktemp("output")


@pytest.fixture
def config(make_config, output):
    return make_config(
        # SQLite's addresses have a meaning for these.
        run={"preset": "debug", "output_dir": str(output / "a?b%20c")},
        tracking={"mlflow": True, "tensorboard": False},
    )


def in_mlflow(run_dir):
    """The run in MLflow."""
    from mlflow import MlflowClient

    record = read_mlflow_record(run_dir)
    return MlflowClient(record["tracking_uri"]).get_run(record["run_id"])


def status(run_dir):
    return in_mlflow(run_dir).info.status


def until_delivered(run_dir, step):
    def is_delivered():
        if "run_id" not in read_mlflow_record(run_dir):
            return False
        metrics = in_mlflow(run_dir).data.to_proto().metrics
        return any(metric.step == step for metric in metrics)

    eventually(is_delivered, f"MLflow has step {step}")


def begin(run_dir, config, resumed_step=None):
    """The record of a training that has taken a step, delivered to MLflow."""
    metrics = Record(run_dir, config, DATASET, resumed_step)
    metrics.append((resumed_step or 0) + 1, {"train/loss": 1.0})
    until_delivered(run_dir, (resumed_step or 0) + 1)
    return metrics


def record_owner(run_dir, owner):
    write_record(run_dir / RUN, RunRecord(dataset=run_dir, dataset_key="k", owner=owner))


def test_the_record_follows_a_run_through_a_stop_a_resume_its_end_and_a_kill(
    tmp_path, config, monkeypatch
):
    from mlflow import MlflowClient

    assert not end_record(tmp_path, "FAILED")
    assert list(tmp_path.iterdir()) == []

    def claim(number):
        """The page of the flow run, on a server that is at another address each time."""
        monkeypatch.setenv("PREFECT_UI_URL", f"http://127.0.0.1:420{number}/v2")
        record_owner(tmp_path, str(number))
        return f"http://127.0.0.1:420{number}/v2/runs/flow-run/{number}"

    first = claim(1)
    begin(tmp_path, config).close("KILLED")
    assert status(tmp_path) == "KILLED"
    assert f"]({first})" in in_mlflow(tmp_path).data.tags[NOTE]
    second = claim(2)
    again = begin(tmp_path, config, resumed_step=1)
    assert status(tmp_path) == "RUNNING"
    record = read_mlflow_record(tmp_path)
    again.close("FINISHED")
    # As if it had been killed between reporting to MLflow and recording it.
    write_json(tmp_path / "logs" / "mlflow.json", record)
    assert not end_record(tmp_path, "FAILED")
    assert status(tmp_path) == "FINISHED"
    assert f"]({second})" in in_mlflow(tmp_path).data.tags[NOTE]

    # A description that has been edited is kept.
    MlflowClient(record["tracking_uri"]).set_tag(record["run_id"], NOTE, "The one to keep.")
    claim(3)
    begin(tmp_path, config, resumed_step=2)
    tags = in_mlflow(tmp_path).data.tags
    assert (tags["prefect.flow_run_id"], tags[NOTE]) == ("3", "The one to keep.")
    # The end of a training that is killed is reported once.
    assert end_record(tmp_path, "FAILED")
    assert not end_record(tmp_path, "KILLED")
    assert status(tmp_path) == "FAILED"


def test_a_record_that_is_deleted_meanwhile_is_begun_again_from_the_first_line(tmp_path, config):
    from mlflow import MlflowClient

    metrics = begin(tmp_path, config)
    for step in range(2, 51):
        metrics.append(step, {"train/loss": 1.0 / step})
    until_delivered(tmp_path, 50)
    first = read_mlflow_record(tmp_path)["run_id"]
    MlflowClient(config.tracking_uri).delete_run(first)
    metrics.append(51, {"train/loss": 1.0})
    metrics.close("FINISHED", timeout_seconds=PATIENCE)
    record = read_mlflow_record(tmp_path)
    assert record["run_id"] != first
    history = MlflowClient(config.tracking_uri).get_metric_history(record["run_id"], "train/loss")
    assert [metric.step for metric in history] == list(range(1, 52))


def test_a_run_is_described_with_its_origin_settings_and_page(tmp_path, config):
    record = {"owner": "0198c0de", "parent": "stable-1", "parent_step": 40}
    write_record(tmp_path / RUN, RunRecord(dataset=tmp_path, dataset_key="k", **record))
    assert run_url("http://127.0.0.1:5000", tmp_path) is None
    number = open_tracking(config)[1]
    begin(tmp_path, config).close("KILLED")
    found = in_mlflow(tmp_path)
    page = f"http://127.0.0.1:5000/#/experiments/{number}/runs/{found.info.run_id}"
    assert run_url("http://127.0.0.1:5000/", tmp_path) == f"{page}?workflowType=machine_learning"
    assert found.data.params["training.max_steps"] == "12"
    assert found.inputs.dataset_inputs[0].dataset.digest == DATASET["key"][:36]
    git = ["git", "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    expected = {
        "prefect.flow_run_id": "0198c0de",
        "branch.parent": "stable-1",
        "branch.parent_step": "40",
        "run.folder": str(tmp_path),
    } | ({"mlflow.source.git.commit": head} if head else {})
    assert expected.items() <= found.data.tags.items()


def test_a_server_that_hangs_does_not_block_the_end(tmp_path, monkeypatch):
    # Longer than the test may take: it is not the client that gives up.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", str(int(10 * PATIENCE)))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        record = {"run_id": "r" * 32, "tracking_uri": uri, "status": "RUNNING"}
        write_json(tmp_path / "logs" / "mlflow.json", record)
        assert not end_record(tmp_path, "FAILED", timeout_seconds=1.0)


# It kills itself when some of the tables exist, but not all.
KILLED = """
import json, os, signal, sys
from sqlalchemy import event
from sqlalchemy.engine import Engine
from infini_model.config import validate
from infini_model.training.mlflow_record import open_tracking
tables = []
@event.listens_for(Engine, "after_cursor_execute")
def kill(connection, cursor, statement, *rest):
    tables.extend([statement] * ("CREATE TABLE" in statement))
    if len(tables) == 8:
        os.kill(os.getpid(), signal.SIGKILL)
open_tracking(validate(json.loads(sys.argv[1])))
"""


def test_a_kill_while_the_tables_are_created_is_recovered_from(make_config):
    config = make_config()
    folder = config.run.output_dir / "mlflow"
    killed = run([sys.executable, "-c", KILLED, config.model_dump_json()], dict(os.environ))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert list(folder.glob(".tmp-*"))
    assert not (folder / "mlflow.db").exists()
    assert int(open_tracking(config)[1]) > 0
    assert not list(folder.glob(".tmp-*"))


def test_an_exporter_that_hangs_delays_neither_steps_nor_the_end(config, tmp_path, monkeypatch):
    asked, released = threading.Event(), threading.Event()

    def hang(exporter, lines):
        asked.set()
        released.wait()

    monkeypatch.setattr(MlflowExporter, "export", hang)
    metrics = Record(tmp_path, config, DATASET)
    assert asked.wait(PATIENCE)
    for step in range(1, 51):
        metrics.append(step, {"train/loss": step + 0.5})
    metrics.close("FINISHED", timeout_seconds=0.0)
    released.set()


@pytest.fixture
def line(monkeypatch):
    """What becomes of the batches that are sent to MLflow, and how many have `met` each fate.

    They are "answered", "dropped" as if the server were down, or "unanswered": the server handles
    them and the client gets no response.
    """
    from mlflow import MlflowClient

    line, log_batch = SimpleNamespace(fate="answered", met=Counter()), MlflowClient.log_batch

    def carry(*arguments, **options):
        fate = line.fate
        if fate != "dropped":
            log_batch(*arguments, **options)
        line.met[fate] += 1
        if fate != "answered":
            raise ConnectionResetError(fate)

    monkeypatch.setattr(MlflowClient, "log_batch", carry)
    return line


def recorded(run_dir):
    """The status and the steps, the same of all metrics, according to MLflow."""
    from mlflow import MlflowClient

    record = read_mlflow_record(run_dir)
    history = MlflowClient(record["tracking_uri"]).get_metric_history
    steps, *others = (sorted(m.step for m in history(record["run_id"], n)) for n in NAMES)
    assert others == [steps] * len(others)
    return status(run_dir), steps


@pytest.mark.story
def test_each_point_arrives_once_through_outages_lost_answers_and_a_kill(line, config, tmp_path):
    def take_steps(metrics, steps):
        for step in steps:
            metrics.append(step, dict.fromkeys(NAMES, step + 0.5))

    def after(fate, steps):
        """Take steps, and wait until a batch has met this fate."""
        line.met.clear()
        line.fate = fate
        take_steps(metrics, steps)
        eventually(lambda: line.met[fate] > 0, f"a batch that was {fate}")

    metrics = Record(tmp_path, config, DATASET)
    after("dropped", range(1, 101))
    line.fate = "answered"
    until_delivered(tmp_path, 100)
    # Now it accepts data without responding, then it is down again, then it is back.
    after("unanswered", range(101, 201))
    after("dropped", range(201, 301))
    line.fate = "answered"
    until_delivered(tmp_path, 300)
    # As if killed while it is down again. The steps after the checkpoint are repeated.
    after("dropped", range(301, 311))
    metrics.close("FINISHED", timeout_seconds=0.0)
    (follower,) = metrics.exporters._followers
    follower.join(PATIENCE)
    assert recorded(tmp_path) == ("RUNNING", list(range(1, 301)))
    line.fate = "answered"
    again = Record(tmp_path, config, DATASET, resumed_step=290)
    take_steps(again, range(291, 331))
    again.close("FINISHED")
    assert recorded(tmp_path) == ("FINISHED", list(range(1, 331)))
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 331))
