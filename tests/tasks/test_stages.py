"""Stages as Prefect tasks: reuse, retries, timeouts, results and artifacts.

Each test runs the command line against a real server and queries that server.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import (
    Environment,
    artifacts,
    eventually,
    flow_run,
    infini,
    infini_here,
    processes_about,
    run,
    task_runs,
    tiny,
    write_settings,
)

from infini_model.config import ModelConfig
from infini_model.model.llama import InfiniLlama
from infini_model.training.initial_weights import read_initial_weights

STAGES = ("download", "plan", "shard", "train", "evaluate")
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


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
    retries = ("stages.download.retries=2", "stages.download.retry_delay_seconds=0")
    command = ("preprocess", "--config", settings, *retries)
    output = output_of(connected, *command, "data.source.paths=[/nowhere/*.txt]", status=2)
    assert ended_tasks(server, output, "download")["download"]["run_count"] == 1
    url = "http://127.0.0.1:9/a.txt"
    output = output_of(connected, *command, f"data.source.paths=['{url}']", status=2)
    assert f"error: {url}: cannot be reached" in output
    assert ended_tasks(server, output, "download")["download"]["run_count"] == 3
    assert flow_run(server, output)["state_type"] == "FAILED"


def test_a_timeout_ends_the_stage_and_all_its_processes(
    server: str, connected: Environment, settings: Path, tmp_path: Path
) -> None:
    # Less than Python takes to start.
    limits = ("stages.download.timeout_seconds=0.01", "stages.download.retries=0")
    output = output_of(connected, "preprocess", "--config", settings, *limits, status=1)
    assert output.splitlines()[-1] == "error: download: not finished after 0.01 s"
    eventually(lambda: not processes_about(tmp_path), "the end of all processes")
    assert states(server, output, "download") == {"download": "TimedOut"}
    assert flow_run(server, output)["state_type"] == "FAILED"


def test_a_server_that_does_not_answer_is_named(alone: Environment, settings: Path) -> None:
    url = "http://127.0.0.1:9/api"
    done = infini_here("run", "--config", settings, env=alone | {"PREFECT_API_URL": url})
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: PREFECT_API_URL: {url} does not answer")


@pytest.mark.story
def test_a_run_checks_its_weights_first_shows_all_that_it_makes_and_resumes_without_the_weights(
    server: str, connected: Environment, text_files: Path, tmp_path: Path
) -> None:
    llama, tree = tmp_path / "llama", tiny(text_files, tmp_path / "output")
    shape = ModelConfig(**tree["model"] | {"vocab_size": 260, "memory": "none"})
    InfiniLlama(shape).save_pretrained(llama)
    beside = {"segment_length": shape.segment_length, "memory": "linear"}
    tree["model"] = {"initial_weights": str(llama)} | beside
    command = ("run", "--config", write_settings(tmp_path / "settings.yaml", tree))
    hidden = (llama / "config.json").rename(tmp_path / "config.json")
    output = output_of(connected, *command, status=2)
    assert states(server, output, "weights") == {"weights": "Failed"}
    assert f"error: {llama}/config.json: no such file" in output

    hidden.rename(llama / "config.json")
    output = output_of(connected, *command, "training.max_steps=19")
    assert list(states(server, output, "weights", *STAGES).values()) == ["Completed"] * 6
    asked = flow_run(server, output)["parameters"]
    assert (asked["preset"], asked["steps"]) == (None, 19)
    assert asked["advanced"]["data"]["splits"] == {"train": 0.6, "validation": 0.2, "test": 0.2}
    (run_dir,) = tmp_path.glob("output/runs/run-1")
    assert read_initial_weights(run_dir) is not None
    expect_shown(artifacts(server, output), run_dir)
    report = run_dir / "report.md"
    results = [*(tmp_path / "prefect-home" / "storage").iterdir()]
    assert str(report) in [json.loads(path.read_text()).get("report") for path in results]

    (run_dir / "evaluation.json").unlink()
    report.unlink()
    shutil.rmtree(llama)
    output = output_of(connected, *command, "training.max_steps=19")
    assert "weights" not in states(server, output, "evaluate")
    assert report.is_file()


def expect_shown(shown: dict[str, dict[str, Any]], run_dir: Path) -> None:
    """The artifacts of a run: progress, dataset, report and plots."""
    for stage in ("shard", "train", "evaluate"):
        assert shown[f"{stage}-progress"]["type"] == "progress"
        assert shown[f"{stage}-progress"]["data"] == 100.0
    assert json.loads(shown["partitions"]["data"]) == [
        {"partitions": "new", "count": 1},
        {"partitions": "reused", "count": 0},
    ]
    steps: list[dict[str, str]] = json.loads(shown["training"]["data"])
    assert steps[0]["step"] == "19 of 19"
    assert any(row["validation loss"] for row in steps)
    rows: list[dict[str, Any]] = json.loads(shown["dataset"]["data"])
    assert [row["split"] for row in rows] == ["train", "validation", "test"]
    assert sum(row["documents"] for row in rows) == 40
    # All of the report but the links to its plots, which are artifacts of their own.
    report = (run_dir / "report.md").read_text()
    lines = [line for line in report.splitlines() if line and "](plots/" not in line]
    assert [line for line in shown["report"]["data"].splitlines() if line] == lines
    plots = list(run_dir.glob("plots/*.png"))
    assert plots
    for plot in plots:
        image = shown[plot.stem.replace("_", "-")]
        assert image["type"] == "image"
        assert image["data"].startswith("data:image/png;base64,iVBOR")
