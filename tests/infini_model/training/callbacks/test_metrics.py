import json
import logging
import math
import sqlite3
import threading

import pytest
from commands import PATIENCE
from records import Record

from infini_model.runtime.metrics_file import MetricsFile, read_metrics, read_newest
from infini_model.training.callbacks.mlflow_record import read_mlflow_record
from infini_model.training.callbacks.sinks import Follower, TensorBoardSink

DATASET = {"name": "corpus", "key": "d" * 64, "path": "/data/corpus"}


def write(run_dir, steps, resumed_step=None):
    file = MetricsFile(run_dir, resumed_step)
    for step in steps:
        file.append(step, {"train/loss": 10.0 - step})
    file.close()


def test_lines_after_the_checkpoint_are_cut_and_each_step_appears_once(tmp_path):
    write(tmp_path, range(1, 8))
    write(tmp_path, range(5, 10), resumed_step=4)
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 10))


def test_a_line_truncated_by_a_kill_is_dropped(tmp_path):
    write(tmp_path, range(1, 4))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/lo')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]
    write(tmp_path, [4], resumed_step=3)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_a_training_from_scratch_truncates_the_file(tmp_path):
    write(tmp_path, [0, 1, 2])
    write(tmp_path, [0])
    assert [line["step"] for line in read_metrics(tmp_path)] == [0]


def test_metrics_recorded_at_this_step_are_known_after_a_restart(tmp_path):
    file = MetricsFile(tmp_path, None)
    file.append(5, {"train/loss": 1.0})
    file.append(5, {"validation/loss": 2.0})
    file.append(6, {"train/loss": 1.0})
    file.close()
    again = MetricsFile(tmp_path, 5)
    assert again.has(5, "validation/loss")
    assert not again.has(5, "test/loss")
    again.close()


def test_the_newest_values_are_found_however_far_back_they_are(tmp_path):
    assert read_newest(tmp_path, "step") == {}
    lines = [{"step": 1, "validation/loss": 7.5}]
    lines += [{"step": step, "train/loss": 1 / step} for step in range(2, 20_001)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 20001, "trai')
    newest = read_newest(tmp_path, "step", "train/loss", "validation/loss", "test/loss")
    assert newest == {"step": 20_000, "train/loss": 1 / 20_000, "validation/loss": 7.5}


class Unreliable:
    """A sink that is down for its first calls."""

    name = "Unreliable"

    def __init__(self, failures):
        self.failures = failures
        self.taken = []
        self.status = None
        self.tried = threading.Event()

    def deliver(self, lines):
        self.tried.set()
        if self.failures > 0:
            self.failures -= 1
            raise ConnectionError("connection refused")
        self.taken += [line["step"] for line in lines]

    def finish(self, status):
        self.status = status


def follow(run_dir, sink):
    """Follow a run that ends once the sink has been tried, and may take forever to finish."""
    follower = Follower(run_dir, sink)
    follower.start()
    assert sink.tried.wait(PATIENCE)
    follower.end("FINISHED", math.inf)
    follower.join(PATIENCE)
    assert not follower.is_alive()
    return follower


def test_a_recovered_sink_gets_what_it_missed_once(tmp_path):
    write(tmp_path, range(1, 6))
    sink = Unreliable(failures=1)
    assert follow(tmp_path, sink).done
    assert sink.taken == [1, 2, 3, 4, 5]
    assert sink.status == "FINISHED"


def test_a_sink_that_stays_down_warns_once_and_is_abandoned_at_the_end(tmp_path, caplog):
    write(tmp_path, range(1, 6))
    sink = Unreliable(failures=10**9)
    with caplog.at_level(logging.WARNING):
        assert not follow(tmp_path, sink).done
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_tensorboard_has_each_step_once_across_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "tensorboard"
    write(tmp_path, range(1, 8))
    for resumed_step, steps in ((None, range(1, 8)), (4, range(5, 10))):
        write(tmp_path, steps, resumed_step)
        sink = TensorBoardSink(folder)
        sink.deliver(read_metrics(tmp_path))
        sink.finish("FINISHED")
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (step, 10.0 - step) for step in range(1, 10)
    ]


def history(run_dir, name):
    """(step, value) of a metric in MLflow's database."""
    record = read_mlflow_record(run_dir)
    database = sqlite3.connect(record["tracking_uri"].removeprefix("sqlite:///"))
    rows = database.execute(
        "SELECT step, value FROM metrics WHERE run_uuid = ? AND key = ? ORDER BY step",
        (record["run_id"], name),
    ).fetchall()
    database.close()
    return rows


@pytest.mark.slow
def test_mlflow_has_each_step_once_across_a_resume_and_a_lost_cursor(tmp_path, make_config):
    config = make_config(tracking={"mlflow": True, "tensorboard": False})
    run_dir = tmp_path / "run"
    for resumed_step, steps in ((None, range(1, 8)), (4, range(5, 10))):
        metrics = Record(run_dir, config, DATASET, resumed_step)
        for step in steps:
            metrics.append(step, {"train/loss": 10.0 - step})
        metrics.close("FINISHED" if resumed_step else "KILLED")
        record = read_mlflow_record(run_dir)
        assert record["delivered_step"] == steps[-1]
        # As after a kill between the delivery to MLflow and recording it.
        (run_dir / "logs" / "mlflow.json").write_text(json.dumps(record | {"delivered_step": 0}))
    assert history(run_dir, "train/loss") == [(step, 10.0 - step) for step in range(1, 10)]

    from mlflow import MlflowClient

    client = MlflowClient(config.tracking_uri)
    run = client.get_run(record["run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.params["training.max_steps"] == "12"
    assert run.data.tags["dataset.key"] == DATASET["key"]
    (dataset_input,) = run.inputs.dataset_inputs
    assert dataset_input.dataset.digest == DATASET["key"][:36]
