"""Stages as Prefect tasks: reuse, retries, timeouts, results and artifacts.

Each test runs the command line against a real server and queries that server.
"""

import json
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import (
    PATIENCE,
    Environment,
    Running,
    alive,
    answers,
    artifacts,
    dataset_of,
    eventually,
    flow_run,
    infini,
    processes_about,
    run,
    task_runs,
    tiny,
    write_settings,
)
from ports import free_port
from stopping import Halt

from flows.serving.services import start_prefect
from infini_model.config import ModelConfig, load_config
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.processes import end_tree
from infini_model.training.initial_weights import read_initial_weights

STAGES = ("download", "plan", "shard", "train", "evaluate")
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
NO_WAIT = ("stages.download.retry_delay_seconds=0", "stages.train.retry_delay_seconds=0")


@pytest.fixture
def settings(tmp_path: Path, text_files: Path) -> Path:
    return write_settings(tmp_path / "settings.yaml", tiny(text_files, tmp_path / "output"))


def output_of(env: Environment, *arguments: str | Path, status: int = 0) -> str:
    """The output of a command that must end with `status`."""
    done = run(infini(*arguments), env)
    output = done.stderr + done.stdout
    assert done.returncode == status, output
    assert "Traceback" not in output
    return output


def ended_tasks(server: str, output: str, *names: str) -> dict[str, dict[str, Any]]:
    """The task runs of a command once it is recorded how `names`, its last ones, have ended.

    Prefect's server records them in the background, from events that it gets in order.
    """
    found: dict[str, dict[str, Any]] = {}

    def is_recorded() -> bool:
        found.update(task_runs(server, output))
        return all(name in found and found[name]["state"]["type"] in FINAL for name in names)

    eventually(is_recorded, lambda: f"the end of {names} in {found}")
    return found


def states(server: str, output: str, *names: str) -> dict[str, str]:
    """How the stages of a command ended; `names` are the last ones."""
    return {name: run["state_name"] for name, run in ended_tasks(server, output, *names).items()}


def test_a_users_mistake_is_not_retried_and_a_silent_host_is(
    server: str, connected: Environment, settings: Path
) -> None:
    command = ("preprocess", "--config", settings, *NO_WAIT, "stages.download.retries=2")
    output = output_of(connected, *command, "data.source.paths=[/nowhere/*.txt]", status=2)
    assert ended_tasks(server, output, "download")["download"]["run_count"] == 1
    url = "http://127.0.0.1:9/a.txt"
    output = output_of(connected, *command, f"data.source.paths=['{url}']", status=2)
    assert f"error: {url}: cannot be reached" in output
    assert ended_tasks(server, output, "download")["download"]["run_count"] == 3
    assert flow_run(server, output)["state_type"] == "FAILED"


@pytest.mark.story
def test_initial_weights_are_checked_first_and_a_resumed_run_does_without_them(
    server: str, connected: Environment, text_files: Path, tmp_path: Path
) -> None:
    llama, tree = tmp_path / "llama", tiny(text_files, tmp_path / "output")
    shape = ModelConfig(**tree["model"] | {"vocab_size": 260, "memory": "none"})
    InfiniLlama(shape).save_pretrained(llama)
    beside = {"segment_length": shape.segment_length, "memory": "linear"}
    tree["model"] = {"initial_weights": str(llama)} | beside
    settings = write_settings(tmp_path / "settings.yaml", tree)
    hidden = (llama / "config.json").rename(tmp_path / "config.json")
    output = output_of(connected, "run", "--config", settings, status=2)
    assert states(server, output, "weights") == {"weights": "Failed"}
    assert f"error: {llama}/config.json: no such file" in output
    hidden.rename(llama / "config.json")
    output = output_of(connected, "run", "--config", settings)
    assert list(states(server, output, "weights", *STAGES).values()) == ["Completed"] * 6
    run_dir = (tmp_path / "output" / "runs" / "latest").resolve()
    assert read_initial_weights(run_dir) is not None
    (run_dir / "evaluation.json").unlink()
    (run_dir / "report.md").unlink()
    shutil.rmtree(llama)
    output = output_of(connected, "run", "--config", settings)
    assert "weights" not in states(server, output, "evaluate")
    assert (run_dir / "report.md").is_file()


@pytest.mark.story
def test_non_finite_numbers_are_retried_twice_and_explained_in_one_line(
    server: str, connected: Environment, settings: Path
) -> None:
    command = ("run", "--config", settings, *NO_WAIT, "stages.train.retries=5")
    output = output_of(connected, *command, "training.learning_rate=1e30", status=1)
    assert ended_tasks(server, output, "train")["train"]["run_count"] == 3
    assert output.count("Resuming after: non-finite at step ") == 2
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "gradient norm nan" in line
    assert "a lower training.learning_rate" in line


# Python reads it at its start. The command that starts a download is stopped until it is resumed,
# so that it cannot end the download before that has reached its host.
HALT_PARENT = """
import os, signal, sys
if "download" in sys.orig_argv:
    os.kill(os.getppid(), signal.SIGSTOP)
"""


def test_a_timeout_ends_the_stage_and_all_its_processes(
    server: str, connected: Environment, settings: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(HALT_PARENT)
    limits = ("stages.download.timeout_seconds=4", "stages.download.retries=0")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(PATIENCE)
        source = f"data.source.paths=['http://127.0.0.1:{silent.getsockname()[1]}/a.txt']"
        command = infini("preprocess", "--config", settings, source, *limits)
        running = Running(command, tmp_path / "log", connected | {"PYTHONPATH": str(site)})
        try:
            with silent.accept()[0]:
                seen = [each for each in running.tree() if "download" in each.cmdline()]
                running.process.send_signal(signal.SIGCONT)
                assert running.wait() == 1
        finally:
            running.end()
    assert seen
    assert running.output.splitlines()[-1] == "error: download: not finished after 4 s"
    assert "Traceback" not in running.output
    assert not alive(seen)
    eventually(lambda: not processes_about(tmp_path), "the end of all processes")
    assert states(server, running.output, "download") == {"download": "TimedOut"}
    assert flow_run(server, running.output)["state_type"] == "FAILED"


def test_a_server_that_does_not_answer_is_named(connected: Environment, settings: Path) -> None:
    url = "http://127.0.0.1:9/api"
    done = run(infini("run", "--config", settings), {**connected, "PREFECT_API_URL": url})
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: PREFECT_API_URL: {url} does not answer")


def test_a_run_shows_its_settings_progress_dataset_report_and_plots_and_leaves_a_json_result(
    server: str, connected: Environment, settings: Path, tmp_path: Path
) -> None:
    output = output_of(connected, "run", "--config", settings, "training.max_steps=19")
    asked = flow_run(server, output)["parameters"]
    assert (asked["preset"], asked["steps"]) == (None, 19)
    assert asked["advanced"]["data"]["splits"] == {"train": 0.6, "validation": 0.2, "test": 0.2}
    assert set(states(server, output, *STAGES).values()) == {"Completed"}
    shown = artifacts(server, output)
    for stage in ("shard", "train", "evaluate"):
        assert shown[f"{stage}-progress"]["type"] == "progress"
        assert shown[f"{stage}-progress"]["data"] == 100.0
    assert json.loads(shown["partitions"]["data"]) == [
        {"partitions": "new", "count": 1},
        {"partitions": "reused", "count": 0},
    ]
    rows: list[dict[str, Any]] = json.loads(shown["dataset"]["data"])
    assert [row["split"] for row in rows] == ["train", "validation", "test"]
    assert sum(row["documents"] for row in rows) == 40
    (report,) = tmp_path.glob("output/runs/run-1/report.md")
    # All of the report but the links to its plots, which are artifacts of their own.
    lines = [line for line in report.read_text().splitlines() if "](plots/" not in line]
    assert [line for line in shown["report"]["data"].splitlines() if line] == [*filter(None, lines)]
    plots = list(report.parent.glob("plots/*.png"))
    assert len(plots) == 6
    for plot in plots:
        image = shown[plot.stem.replace("_", "-")]
        assert image["type"] == "image"
        assert image["data"].startswith("data:image/png;base64,iVBOR")

    (result,) = (tmp_path / "prefect-home" / "storage").iterdir()
    assert json.loads(result.read_text())["report"] == str(report)


@pytest.mark.story
def test_training_continues_when_the_server_is_gone(
    connected: Environment,
    settings: Path,
    tmp_path: Path,
    text_files: Path,
    with_tables: Callable[[Path], Path],
) -> None:
    """Nothing that was computed is lost, although the server cannot be notified."""
    tree = tiny(
        text_files,
        tmp_path / "output",
        launch={"hang_timeout_seconds": PATIENCE},
        stages={"train": {"retries": 0}},
    )
    dataset_of(write_settings(settings, tree))
    config = load_config(overrides=[f"run.output_dir={with_tables(tmp_path / 'server')}"])
    halt = Halt(tmp_path / "halt", 10)
    service = start_prefect(config, free_port())
    env = {
        **connected,
        **halt.environment,
        "PREFECT_API_URL": f"{service.url}/api",
        "PREFECT_CLIENT_MAX_RETRIES": "0",
    }
    try:
        eventually(lambda: answers(f"{service.url}/api/health"), "the server")
        running = Running(infini("train", "--config", settings), tmp_path / "log", env)
        try:
            halt.wait()
            end_tree(service.process, 0.0)
            halt.resume()
            running.wait_for("Step [20/20] | test/loss")
            running.wait_for("Prefect did not accept the progress")
            assert running.output.count("Seed: 0") == 1
            run_dir = tmp_path / "output" / "runs" / "run-1"
            last = run_dir / "checkpoints" / "step-20"
            eventually(last.is_dir, "the last checkpoint")
        finally:
            running.end()
    finally:
        end_tree(service.process, 0.0)
