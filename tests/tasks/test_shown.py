"""What a flow run shows of its stages: messages, names, links, reports and progress."""

import json
import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest
from commands import PATIENCE
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext

from infini_model.config import load_config
from infini_model.runtime.errors import UserError
from infini_model.runtime.pictures import FOLDER
from infini_model.runtime.records import write_record
from infini_model.runtime.runs import RUN, RunRecord
from infini_model.runtime.storage import make_folder, write_json
from infini_model.training.launch.failures import TrainingFailure
from infini_model.training.mlflow_record import PAGE
from tasks import artifacts, failures
from tasks.train import mlflow_link, newest_step, outcome


def test_a_failure_of_a_training_says_what_is_saved(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints" / "step-5").mkdir(parents=True)
    shape = ["model.hidden_size=1024", "model.intermediate_size=4096"]
    launch = ["launch.gpus=cpu", "launch.gradient_checkpointing=true", "training.batch_size=8"]
    config = load_config(overrides=[*shape, *launch])

    def said(error: Exception) -> str:
        with FlowRunContext.model_construct(flow_run=FlowRun(flow_id=uuid4())):
            failures.note_training(error, config, dataset, tmp_path, [])
            return failures.reason(error)

    assert said(UserError("/full: No space left")) == "/full: No space left; step 5 is saved"
    resumes = "step 5 is saved; the same command resumes"
    killed = TrainingFailure("crash", "killed by SIGKILL")
    assert said(killed).endswith(f": killed by SIGKILL; {resumes}")
    full = TrainingFailure("out of memory", "killed by the kernel", is_killed=True)
    assert said(full).endswith(f": killed by the kernel; {resumes}")
    full.is_final = True
    assert "; training.batch_size=4 " in said(full)
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "a worker's")
    assert said(killed).endswith("; step 5 is saved; Retry resumes")


@pytest.mark.parametrize(
    ("when", "told"), [("1.03 second(s) from now", "in 2 s"), ("immediately",) * 2]
)
def test_a_retry_is_announced_with_its_cause_and_no_advice(when: str, told: str) -> None:
    state = failures.failed(TrainingFailure("crash", "killed by SIGKILL"))
    args = ("state", state, 1, 2, when)
    record = logging.LogRecord("prefect.task_runs", logging.INFO, "", 1, failures.RETRY, args, None)
    assert failures._OneTraceback().filter(record)
    cause = "training failed: crash: killed by SIGKILL"
    assert record.getMessage() == f"{cause}; retry 1 of 2 {told}"
    assert record.levelno == logging.WARNING


def test_what_came_out_of_a_training_is_told_in_short(tmp_path: Path) -> None:
    run_dir = make_folder(tmp_path / "debug-1")
    assert outcome(run_dir) == "run debug-1"  # a machine other than the first
    lines = ('{"step": 1000, "validation/loss": 2.7291}', '{"step": 1200, "train/loss": 2.5}')
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert outcome(run_dir) == "run debug-1 · 1,200 steps · validation loss 2.729"


def test_a_running_training_shows_its_newest_step(tmp_path: Path) -> None:
    write_record(tmp_path / RUN, RunRecord(dataset=tmp_path, dataset_key="key", max_steps=2000))
    assert newest_step(tmp_path) == ""
    step = {"train/loss": 2.42061, "train/tokens_per_second": 12344.6}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1490} | step) + "\n")
    assert newest_step(tmp_path) == "step 1,490 of 2,000 · loss 2.4206 · 12,345 tokens/s"


def test_a_run_is_linked_once_mlflow_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def linked(*overrides: str) -> str | None:
        link = mlflow_link(tmp_path, load_config(overrides=overrides))
        return None if link is None else link.link

    monkeypatch.setenv(PAGE, "http://127.0.0.1:5000")
    assert linked() is None
    record = {"run_id": "r1", "experiment_id": "7", "tracking_uri": "http://mlflow:5000"}
    write_json(tmp_path / "logs" / "mlflow.json", record)
    page = "#/experiments/7/runs/r1?workflowType=machine_learning"
    assert linked() == f"http://mlflow:5000/{page}"
    assert linked("tracking.mlflow=false") is None
    write_json(tmp_path / "logs" / "mlflow.json", record | {"tracking_uri": "sqlite:///mlflow.db"})
    assert linked() == f"http://127.0.0.1:5000/{page}"
    monkeypatch.delenv(PAGE)
    assert linked() is None


def test_a_report_has_the_addresses_of_its_pictures_and_of_nothing_that_it_quotes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture, secret = tmp_path / "plots" / "loss.png", tmp_path / "secret"
    picture.parent.mkdir()
    for path in (picture, secret):
        path.write_text(path.name)
    quoted = f"![a]({secret})\n![b](secret)\n![c](none.png)"
    report = tmp_path / "report.md"
    report.write_text(f"# One\n\n![Loss](plots/loss.png)\n\n{quoted}\n")
    monkeypatch.setenv(FOLDER, str(tmp_path / "shown"))
    text = artifacts.with_pictures(report, [picture])
    (published,) = (tmp_path / "shown").iterdir()
    assert published.read_text() == picture.name
    assert text == f"# One\n\n![Loss](/pictures/{published.name})\n\n{quoted}\n"
    monkeypatch.delenv(FOLDER)
    text = artifacts.with_pictures(report, [picture])
    assert text == f"# One\n\nLoss: `{picture}`\n\n{quoted}\n"


def test_progress_is_sent_in_whole_percent_and_whenever_its_note_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent, notes = list[tuple[float, str]](), iter(["", "", "", "step 2,999", "step 3,000"])
    client = SimpleNamespace(
        update_artifact=lambda _, update: sent.append((update.data, update.description))
    )
    monkeypatch.setattr(artifacts, "get_client", lambda **_: client)
    monkeypatch.setattr(artifacts, "find", lambda *_: uuid4())
    updates = list[Callable[[], None]]()
    monkeypatch.setattr(
        artifacts, "updates", lambda _, update, __: nullcontext(updates.append(update))
    )
    with artifacts.progress("train", "steps", logged=False, note=lambda: next(notes)) as show:
        (update,) = updates
        update()
        for done in (1000, 1001, 2999, 2999, 3000):
            show(done, 3000)
            update()
    percent = "train: percent of all steps"
    assert sent == [(33, percent), (99, percent), (99, "step 2,999"), (100, "step 3,000")]


def test_a_server_that_is_gone_is_one_warning_and_harms_no_stage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(artifacts, "get_run_logger", logging.getLogger)
    tried = threading.Semaphore(0)

    def update() -> None:
        tried.release()
        raise ConnectionError("no server")

    with caplog.at_level(logging.WARNING), artifacts.updates("progress", update, 0.01):
        for _ in range(3):
            assert tried.acquire(timeout=PATIENCE)
    with artifacts.warn_on_error("report"):
        raise ConnectionError("no server")
    told = "Prefect did not accept the {} (no server); the stage continues"
    found = [line for line in caplog.messages if "Prefect did not accept" in line]
    assert found == [told.format("progress"), told.format("report")]
