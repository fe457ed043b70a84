"""Stages as Prefect tasks: reuse, retries, results and artifacts.

Each test runs the command line against a real server and queries that server.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import (
    Environment,
    dataset_of,
    eventually,
    flow_run,
    infini,
    infini_here,
    run,
    tiny,
    write_settings,
    write_texts,
)
from prefect.states import Failed
from serving import Server

from infini_model.config import ModelConfig, load_config
from infini_model.model.llama import InfiniLlama
from infini_model.runtime import processes
from infini_model.runtime.errors import ConfigError, StageError
from infini_model.runtime.storage import make_folder
from infini_model.training.initial_weights import read_initial_weights
from tasks.download import download
from tasks.stage import _outcome, is_worth_a_retry

STAGES = ("download", "screen", "plan", "shard", "train", "evaluate")
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


@pytest.fixture
def settings(tmp_path: Path, text_files: Path) -> Path:
    return write_settings(tmp_path / "settings.yaml", tiny(text_files, tmp_path / "output"))


def output_of(env: Environment, *arguments: str | Path, status: int = 0) -> str:
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
        found.update(Server(server).tasks(flow_run(server, output)["id"]))
        return all(name in found and found[name]["state"]["type"] in FINAL for name in names)

    eventually(is_recorded, lambda: f"the end of {names} in {found}")
    return found


def test_a_silent_host_is_retried_and_no_mistake(
    server: str, connected: Environment, settings: Path
) -> None:
    retries = ("stages.fetch_retries=2", "stages.retry_delay_seconds=0")
    command = ("preprocess", "--config", settings, *retries)
    output = output_of(connected, *command, "data.source.paths=[/nowhere/*.txt]", status=2)
    assert ended_tasks(server, output, "download")["download"]["run_count"] == 1
    url = "http://127.0.0.1:9/a.txt"
    output = output_of(connected, *command, f"data.source.paths=['{url}']", status=2)
    assert f"error: {url}: cannot be reached" in output
    assert ended_tasks(server, output, "download")["download"]["run_count"] == 3
    assert flow_run(server, output)["state_type"] == "FAILED"


@pytest.mark.parametrize(
    ("number", "is_worth"),
    [(signal.SIGABRT, False), (signal.SIGSEGV, False), (signal.SIGKILL, True), (0, True)],
)
def test_a_stage_that_aborts_is_not_retried(number: int, is_worth: bool) -> None:
    program = f"import os; os.kill(os.getpid(), {number}); os._exit(1)"
    status = processes.run([sys.executable, "-c", program], on_line=lambda _: None)
    with pytest.raises(StageError) as ended:
        _outcome("shard", status, {}, ["the last line"])
    assert str(ended.value) == f"shard ended with status {-number or 1}: the last line"
    state = Failed(data=ended.value)
    assert asyncio.run(is_worth_a_retry(None, None, state)) == is_worth  # type: ignore[arg-type]


def test_a_dataset_is_no_place_for_datasets(dataset: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^run\.data_dir: {dataset} is a finished dataset"):
        download(load_config(overrides=[f"run.data_dir={dataset}"]))


@pytest.mark.story
def test_preprocess_cleans_up_and_a_cleaning_that_fails_is_a_warning(
    connected: Environment, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    texts = write_texts(tmp_path / "texts", 12)
    settings = write_settings(tmp_path / "settings.yaml", tiny(texts, output))
    first = dataset_of(settings)
    for path in filter(Path.is_file, output.rglob("*")):
        os.utime(path, (0, 0))
    write_texts(texts, 13)
    dataset_of(settings)
    damaged = make_folder(output / "datasets" / f"other-{'0' * 16}") / "manifest.json"
    damaged.write_text("{")
    command = ("preprocess", "--config", settings, "data.keep=1")
    told = f"Older datasets were not removed: {damaged}: is damaged"
    assert told in output_of(connected, *command)
    assert first.is_dir()
    damaged.unlink()
    assert "Removed: 1 partition, 1 dataset: " in output_of(connected, *command)
    assert not first.exists()


def test_a_server_that_does_not_answer_is_named(alone: Environment, settings: Path) -> None:
    url = "http://127.0.0.1:9/api"
    done = infini_here("run", "--config", settings, env=alone | {"PREFECT_API_URL": url})
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: PREFECT_API_URL: {url} does not answer")


def test_an_address_that_is_not_the_api_is_named(
    server: str, alone: Environment, settings: Path
) -> None:
    for url in (server.removesuffix("/api"), f"{server}/v2/"):
        done = infini_here("run", "--config", settings, env=alone | {"PREFECT_API_URL": url})
        told = f"error: PREFECT_API_URL: {url} answers 404; does it end in /api?\n"
        assert (done.returncode, done.stderr) == (2, told)


@pytest.mark.story
def test_a_run_checks_its_weights_first_shows_all_that_it_makes_and_resumes_without_the_weights(
    server: str, connected: Environment, text_files: Path, tmp_path: Path
) -> None:
    llama, tree = tmp_path / "llama", tiny(text_files, tmp_path / "output")
    shape = ModelConfig(**tree["model"] | {"vocab_size": 260, "memory": "none"})
    InfiniLlama(shape).save_pretrained(llama)
    beside = {"segment_length": shape.segment_length, "memory": "linear"}
    tree["model"] = {"initial_weights": str(llama)} | beside
    tree["data"]["source"]["screen"] = {}
    command = ("run", "--config", write_settings(tmp_path / "settings.yaml", tree))
    output = output_of(connected, *command, "training.max_steps=19")
    ended = ended_tasks(server, output, "weights", *STAGES)
    assert [task["state_name"] for task in ended.values()] == ["Completed"] * 7
    assert min(ended, key=lambda name: ended[name]["start_time"]) == "weights"
    ran = flow_run(server, output)
    # As it was typed, over the file.
    assert ran["parameters"]["advanced"]["training"] == tree["training"] | {"max_steps": 19}
    (run_dir,) = tmp_path.glob("output/runs/run-1")
    assert read_initial_weights(run_dir) is not None
    report, shown = run_dir / "report.md", Server(server).artifacts(ran["id"])
    for stage in ("shard", "train", "evaluate"):
        assert shown[f"{stage}-progress"] == 100.0
    first = json.loads(shown["screened"])[0]
    assert (first["outcome"], first["share"]) == ("kept", "100.0%")
    assert json.loads(shown["partitions"])[0] == {"partitions": "new", "count": 1}
    assert sum(row["documents"] for row in json.loads(shown["dataset"])) == 40
    # Of a server that shows no pictures.
    text, pictures = re.subn(r"!\[(.*)\]\((.*)\)", rf"\1: `{run_dir}/\2`", report.read_text())
    assert pictures > 1
    assert shown["report"] == text
    assert shown["run-folder"] == f"`{run_dir}`"
    results = [*(tmp_path / "prefect-home" / "storage").iterdir()]
    assert str(report) in [json.loads(path.read_text()).get("report") for path in results]

    (run_dir / "evaluation.json").unlink()
    report.unlink()
    shutil.rmtree(llama)
    output = output_of(connected, *command, "training.max_steps=19")
    assert "weights" not in ended_tasks(server, output, "evaluate")
    assert report.is_file()
