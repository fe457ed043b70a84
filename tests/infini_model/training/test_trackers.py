"""Weights & Biases and trackio: their own clients, and each step once, whatever went wrong before.

trackio keeps its records in a folder; Weights & Biases is a server of the tests.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from ports import free_port
from wandb_server import WandbServer

from infini_model.config import dump_config
from infini_model.runtime.errors import ConfigError
from infini_model.runtime.metrics_file import MetricsFile, read_metrics
from infini_model.training import trackers
from infini_model.training.trackers import Tracker, send_evaluation, trackers_of
from infini_model.training.train import train

# Exports what the run has recorded, and is killed.
KILLED = """
import os, pathlib, signal, sys, time
from infini_model.config import load_config
from infini_model.training.trackers import Tracker
name, run_dir, config = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
tracker = Tracker(name, run_dir, load_config(file=config))
tracker.export([])
print("exported", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def trackio_folder(tmp_path_factory):
    """The folder of trackio, which reads the variable when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("trackio")
        patch.setenv("TRACKIO_DIR", str(folder))
        yield folder


@pytest.fixture
def server(monkeypatch):
    """A server of Weights & Biases that this process and those that it starts log in to."""
    import wandb

    server = WandbServer(free_port())
    server.start()
    for name, value in {
        "WANDB_BASE_URL": server.url,
        "WANDB_API_KEY": "k" * 40,
        "WANDB_ERROR_REPORTING": "false",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(trackers, "OPEN_SECONDS", 5.0)
    yield server
    server.stop()
    wandb.teardown()


class Records:
    """The records of one of the two, and the settings that ask for it."""

    def __init__(self, name, server, make_config):
        self.name, self._server = name, server
        asked = {"wandb": "project"} if name == "wandb" else {"trackio": True}
        self.config = make_config(tracking={"experiment_name": "trained", **asked})

    def rows(self, run_dir):
        """The metrics of a run by step, each step in the order in which it was sent."""
        if self.name == "wandb":
            run = json.loads((run_dir / "logs" / "wandb.json").read_text())["id"]
            found = [row for _, row in sorted(self._server.rows[run].items())]
            return [
                (row["_step"], {k: v for k, v in row.items() if not k.startswith("_")})
                for row in found
            ]
        from trackio import SQLiteStorage

        record = json.loads((run_dir / "logs" / "trackio.json").read_text())
        logs = SQLiteStorage.get_logs("trained", f"{run_dir.name}-{record['id']}")
        return [
            (row["step"], {k: v for k, v in row.items() if k not in ("step", "timestamp")})
            for row in logs
        ]


@pytest.fixture(params=["wandb", "trackio"])
def records(request, server, trackio_folder, make_config):
    return Records(request.param, server, make_config)


def recorded(run_dir):
    """What metrics.jsonl has of each step."""
    rows = {}
    for line in read_metrics(run_dir):
        metrics = {name: value for name, value in line.items() if name not in ("step", "time")}
        rows.setdefault(line["step"], {}).update(metrics)
    return list(rows.items())


def test_a_training_arrives_row_by_row_with_its_settings_and_its_scores(
    records, server, dataset, tmp_path
):
    train(records.config, dataset, tmp_path)
    rows = recorded(tmp_path)
    assert [step for step, _ in rows] == list(range(13))
    assert records.rows(tmp_path) == rows
    send_evaluation(trackers_of(tmp_path, records.config), 12, {"evaluation/loss": 1.5})
    found = records.rows(tmp_path)
    assert found[: len(rows)] == rows
    if records.name == "wandb":
        (run,) = server.summaries
        assert server.names[run] == tmp_path.name
        assert (server.summaries[run]["evaluation/loss"], server.exits[run]) == (1.5, 0)
    else:
        assert found[len(rows) :] == [(12, {"evaluation/loss": 1.5})]


def test_each_step_arrives_once_through_a_kill_and_a_resume(records, tmp_path):
    def take_steps(steps, resumed_step):
        file = MetricsFile(tmp_path, resumed_step)
        for step in steps:
            file.append(step, {"train/loss": 10.0 - step})
            if step % 4 == 0:
                file.append(step, {"validation/loss": 11.0 - step})
        file.close()

    take_steps(range(1, 9), None)
    settings = tmp_path / "settings.yaml"
    settings.write_text(dump_config(records.config))
    command = [sys.executable, "-c", KILLED, records.name, str(tmp_path), str(settings)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as killed:
        assert any(line == "exported\n" for line in killed.stdout)
        killed.communicate("\n")
    # The steps after the checkpoint are repeated.
    take_steps(range(6, 13), 5)
    again = Tracker(records.name, tmp_path, records.config)
    again.export([])
    again.finish("FINISHED")
    assert records.rows(tmp_path) == recorded(tmp_path)
    third = Tracker(records.name, tmp_path, records.config)
    third.export([])
    third.finish("FINISHED")
    assert records.rows(tmp_path) == recorded(tmp_path)


def test_the_validation_of_an_interrupted_step_arrives_after_the_resume(records, tmp_path):
    """In the record of this run, though another one has its name."""
    for run_dir in (tmp_path / "here" / "run-1", tmp_path / "there" / "run-1"):
        file = MetricsFile(run_dir, None)
        for step in (1, 2):
            file.append(step, {"train/loss": 10.0 - step})
        file.close()
        tracker = Tracker(records.name, run_dir, records.config)
        tracker.export([])
        tracker.finish("KILLED")
    run_dir = tmp_path / "here" / "run-1"
    file = MetricsFile(run_dir, 2)
    file.append(2, {"validation/loss": 5.0})
    file.append(3, {"train/loss": 7.0})
    file.close()
    again = Tracker(records.name, run_dir, records.config)
    again.export([])
    again.finish("FINISHED")
    assert records.rows(run_dir) == recorded(run_dir)


def test_a_server_that_comes_back_gets_what_it_missed(server, make_config, tmp_path):
    """Also in the process that could not reach it before, and that could not end its record."""
    records = Records("wandb", server, make_config)
    file = MetricsFile(tmp_path, None)
    for step in range(1, 6):
        file.append(step, {"train/loss": 10.0 - step})
    tracker = Tracker("wandb", tmp_path, records.config)
    server.stop()
    with pytest.raises(Exception, match="refused"):
        tracker.export([])
    server.start()
    tracker.export([])
    file.append(6, {"train/loss": 1.0})
    server.stop()
    tracker.export(read_metrics(tmp_path)[-1:])
    with pytest.raises(TimeoutError):
        tracker.finish("FINISHED")
    server.start()
    send_evaluation(trackers_of(tmp_path, records.config), 6, {})
    assert records.rows(tmp_path) == recorded(tmp_path)


def test_a_tracker_that_is_not_installed_is_named_before_anything_starts(
    make_config, monkeypatch, tmp_path
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert not trackers_of(tmp_path, make_config())
    with pytest.raises(ConfigError, match=r"tracking\.trackio: .*pip install 'infini-model"):
        trackers_of(tmp_path, make_config(tracking={"trackio": True}))
