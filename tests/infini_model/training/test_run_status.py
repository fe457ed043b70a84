"""The status of a run, read from its folder."""

import json
import time
from pathlib import Path

import pytest

from infini_model.config import load_config
from infini_model.runtime.claims import claim_run
from infini_model.runtime.holders import Owner
from infini_model.runtime.metrics_file import read_metrics
from infini_model.runtime.runs import MODEL, record_evaluation
from infini_model.runtime.storage import make_folder
from infini_model.training.launch.failures import TrainingFailure
from infini_model.training.launch.recovery import record_failure
from infini_model.training.launch.reservation import waiting_note
from infini_model.training.run_status import RunStatus, list_runs, read_status, saved_step

OWNER = Owner("f1")


def claim(output: Path, name: str):
    settings = ["training.max_steps=10", f"run.output_dir={output}", f"run.name={name}"]
    return claim_run(load_config(overrides=settings), "k1", Path("data"), owner=OWNER)


def begin(output: Path, name: str, step: int) -> Path:
    with claim(output, name) as run_dir:
        lines = [{"step": step - 1, "time": time.time(), "validation/loss": 3.5}]
        lines += [{"step": step, "time": time.time(), "train/loss": 2.5}]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run_dir / "metrics.jsonl").write_text(text)
        return run_dir


def test_the_state_is_that_of_the_last_attempt(tmp_path: Path) -> None:
    run_dir = begin(tmp_path, "one", 5)
    assert read_status(run_dir).state == "interrupted"
    record_failure(run_dir, TrainingFailure("preempted", "SIGTERM came"), load_config())
    assert read_status(run_dir).state == "interrupted"
    record_failure(run_dir, TrainingFailure("crash", "killed by SIGKILL", 1), load_config())
    run = read_status(run_dir)
    assert (run.state, run.detail) == ("failed", "crash")
    begin(tmp_path, "one", 7)
    updated = read_metrics(run_dir)[-1]["time"]
    assert read_status(run_dir) == RunStatus(run_dir, "interrupted", "", 7, 10, 2.5, 3.5, updated)
    make_folder(run_dir / MODEL)
    assert read_status(run_dir).state == "trained"
    with claim(tmp_path, "one"):
        assert read_status(run_dir).state == "running"
        make_folder(waiting_note(run_dir).parent)
        waiting_note(run_dir).write_text("Waiting for the CPU")
        run = read_status(run_dir)
        assert (run.state, run.detail) == ("waiting", "Waiting for the CPU")
    record_evaluation(run_dir, 10, "k1", {})
    assert read_status(run_dir).state == "finished"
    assert saved_step(run_dir) is None
    for step in (5, 10):
        (run_dir / "checkpoints" / f"step-{step}").mkdir(parents=True)
    assert saved_step(run_dir) == 10


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("run.json", "{"),
        ("run.json", '{"dataset": null, "dataset_key": "k", "max_steps": 5}'),
        ("metrics.jsonl", '{"step": 5, not JSON\n'),
        ("recovery.json", "[]"),
    ],
)
def test_a_damaged_folder_is_reported_and_does_not_affect_others(
    tmp_path: Path, file: str, content: str
) -> None:
    damaged, whole = begin(tmp_path, "one", 5), begin(tmp_path, "two", 5)
    (damaged / file).write_text(content)
    (tmp_path / "runs" / "three").mkdir()
    found = {run.run_dir.name: run for run in list_runs(tmp_path / "runs")}
    assert {name: run.state for name, run in found.items()} == {
        "one": "damaged",
        "two": "interrupted",
        "three": "empty",
    }
    assert found["one"].detail
    assert "\n" not in found["one"].detail
    assert found["two"] == read_status(whole)
