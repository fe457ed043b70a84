"""`infini runs`, `resume`, `cancel` and `logs` on real runs, however they were started."""

import asyncio
import json
import re
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from uuid import UUID

import pytest
from commands import (
    PATIENCE,
    Environment,
    Running,
    api,
    dataset_of,
    eventually,
    infini,
    infini_here,
    succeed,
    tiny,
    write_settings,
)
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.events.clients import PrefectEventSubscriber
from prefect.events.filters import EventFilter, EventNameFilter
from prefect.settings import PREFECT_API_URL, temporary_settings
from stopping import Halt

from flows import runs
from flows.presets import configure
from infini_model.config import load_config
from infini_model.runtime.claims import claim_run
from infini_model.runtime.errors import UserError
from infini_model.runtime.holders import Holder, Owner
from infini_model.runtime.runs import MODEL, is_finished, read_run, record_evaluation, run_holder
from infini_model.runtime.storage import make_folder
from infini_model.training.run_status import saved_step
from tasks.flow_run import current_owner

Started = Callable[..., Running]
Told = Callable[..., tuple[int, str]]


@pytest.fixture
def start(background: Callable[..., Running], connected: Environment) -> Started:
    def begin(*arguments: str | Path, **environment: str) -> Running:
        return background(infini(*arguments), connected | environment)

    return begin


@pytest.fixture
def told(output: Path, connected: Environment) -> Told:
    """What a command that needs no server says of the output folder, and its exit status."""

    def tell(*arguments: str) -> tuple[int, str]:
        done = infini_here(*arguments, "--output-dir", output, env=connected)
        return done.returncode, done.stdout + done.stderr

    return tell


@pytest.mark.story
def test_a_run_is_listed_cancelled_and_resumed_from_another_terminal(
    start: Started,
    told: Told,
    output: Path,
    text_files: Path,
    tmp_path: Path,
    connected: Environment,
) -> None:
    launch = {"hang_timeout_seconds": PATIENCE}
    tree = tiny(text_files, output, launch=launch, checkpoint={"save_steps": 20})
    settings = write_settings(tmp_path / "settings.yaml", tree)
    dataset, halt = dataset_of(settings), Halt(tmp_path / "halt", 5)
    running = start("train", "--config", settings, **halt.environment)
    run_dir = output / "runs" / "run-1"
    halt.wait()
    followed = start("logs", "run-1", "--follow", "--output-dir", output)
    followed.wait_for("Step [5/20]")

    holder = f"process {running.process.pid} "
    (row,) = [line for line in told("runs")[1].splitlines() if "run-1" in line]
    assert re.search(rf"^run-1 +5/20 +running: {holder}", row)
    owner = read_run(run_dir).owner
    page = f"{connected['PREFECT_API_URL'].removesuffix('/api')}/runs/flow-run/{owner}"
    status, line = told("resume", "run-1")
    assert status == 2
    assert f"{run_dir} is in use by {holder}(flow run {page})" in line

    cancelling = start("cancel", "run-1", "--output-dir", output)
    halt.resume_told()
    assert running.wait() == 130, running.output
    saved = saved_step(run_dir) or 0
    assert 5 <= saved < 20
    assert cancelling.wait() == followed.wait() == 0
    assert cancelling.output.endswith(f"Cancelled run-1; step {saved} is saved\n")
    assert f"Step [{saved}/20]" in followed.output
    assert "interrupted" in told("runs")[1]

    shutil.rmtree(dataset)
    command = infini("resume", "logging.logging_steps=50", "--output-dir", output)
    resumed = succeed(command, connected)
    printed = resumed.stderr + resumed.stdout
    assert "rebuilding it" in printed
    assert f"Resuming from: {run_dir}/checkpoints/step-{saved}" in printed
    assert f"Report: {run_dir}/report.md" in resumed.stdout.splitlines()
    assert is_finished(run_dir)
    assert read_run(run_dir).owner not in (None, owner)
    assert told("resume", "run-1") == (0, f"{run_dir} is already finished; nothing to do\n")

    # A branch that is killed is resumed by the same command, and is listed with its parent.
    halt = Halt(tmp_path / "halt again", 25)
    longer = ("training.max_steps=26", "training.schedule=constant", "checkpoint.save_steps=2")
    killed = start("branch", "run-1", *longer, "--output-dir", output, **halt.environment)
    halt.wait()
    killed.end()
    again = succeed(infini("branch", "run-1", *longer, "--output-dir", output), connected)
    resumed_from = f"Resuming from: {output}/runs/run-1-branch-1/checkpoints/step-2"
    assert resumed_from in again.stderr + again.stdout
    assert re.search(r"run-1-branch-1 +26/26 +finished .+ run-1@20 ", told("runs")[1])
    report = (output / "runs" / "run-1-branch-1" / "report.md").read_text()
    assert "| Branch of | `run-1`, step 20 |" in report
    assert told("branch", "run-1") == (
        2,
        "error: training.max_steps: is 20, and the branch begins at step 20; set a larger total\n",
    )


def test_a_worker_hears_of_no_cancellation_of_the_past(server: str) -> None:
    """It would take it for one of the retry that it has just started."""
    flow = api(server, "flows/", name="heard")["id"]
    old, new = (api(server, "flow_runs/", flow_id=flow)["id"] for _ in range(2))
    name = "prefect.flow-run.Cancelling"

    def cancel(number: str) -> str:
        api(server, f"flow_runs/{number}/set_state", state={"type": "CANCELLING"}, force=True)
        return f"prefect.flow-run.{number}"

    def recorded() -> set[str]:
        found = api(server, "events/filter", filter={"event": {"name": [name]}})["events"]
        return {event["resource"]["prefect.resource.id"] for event in found}

    before = cancel(old)
    eventually(lambda: before in recorded(), "the event")

    async def first_heard() -> str | None:
        wanted = EventFilter(event=EventNameFilter(name=[name]))
        async with PrefectEventSubscriber(server, wanted) as heard:
            await asyncio.to_thread(cancel, new)
            return (await anext(heard)).resource.id

    assert asyncio.run(first_heard()) == f"prefect.flow-run.{new}"


def test_the_flow_run_of_a_deployment_is_cancelled_through_prefect(
    output: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = api(server, "flows/", name="managed")["id"]
    deployment = api(server, "deployments/", name="managed", flow_id=flow)["id"]
    created = api(server, f"deployments/{deployment}/create_flow_run", state={"type": "RUNNING"})
    number, run_dir = created["id"], output / "runs" / "debug-1"
    config = configure(["debug"], overrides=[f"run.output_dir={output}"])

    def is_cancelling() -> bool:
        return bool(api(server, f"flow_runs/{number}", "GET")["state_type"] == "CANCELLING")

    def work_until_it_is_cancelled() -> None:
        with claim_run(config, "k1", Path("data"), owner=Owner(number, adopts=False)):
            eventually(is_cancelling, "the cancellation")

    monkeypatch.setenv("PREFECT_API_URL", server)
    # Whoever meant to send a signal would ask this first.
    monkeypatch.setattr(Holder, "is_on_this_machine", lambda _: pytest.fail("a signal"))
    with ThreadPoolExecutor() as pool, temporary_settings({PREFECT_API_URL: server}):
        working = pool.submit(work_until_it_is_cancelled)
        eventually(lambda: run_holder(run_dir) is not None, "the claim")
        assert runs.cancel(run_dir) == "nothing is saved"
        working.result()


def test_what_a_finished_run_lacks_is_named(output: Path) -> None:
    places = load_config(overrides=[f"run.output_dir={output}"]).run
    config = configure(["debug"], overrides=[f"run.output_dir={output}"])
    with claim_run(config, "k1", Path("data")) as run_dir:
        make_folder(run_dir / MODEL)
    with pytest.raises(UserError, match=f"infini resume {run_dir.name} evaluates the trained one"):
        runs.to_resume(places, [])
    record_evaluation(run_dir, config.training.max_steps, "k1", {})
    assert runs.to_resume(places, [run_dir.name, "launch.gpus=cpu"]) == (run_dir, None)
    for override in ("training.max_steps=40", "training.max_step=40"):
        told = r"different settings \(training.max_steps|unknown key"
        with pytest.raises(UserError, match=told):
            runs.to_resume(places, [run_dir.name, override])
    for asked, told in (
        (lambda: runs.to_resume(places, ["launch.gpus=cpu"]), "there is no interrupted run"),
        (lambda: runs.cancel(run_dir), "is not running"),
        (lambda: runs.print_logs(runs.find_run_folder(places, None), follow=True), "no logs yet"),
    ):
        with pytest.raises(UserError, match=told):
            asked()


def test_the_log_of_torchrun_is_shown_with_those_of_the_ranks(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    logs = make_folder(tmp_path / "logs")
    for name in ("torchrun", "rank-0", "rank-1"):
        (logs / f"{name}.log").write_text(f"of {name}\n")
    runs.print_logs(tmp_path, follow=False)
    assert capfdbinary.readouterr().out.split(b"\n") == [
        b"of rank-0",
        b"of rank-1",
        b"of torchrun",
        b"",
    ]


def test_a_narrow_terminal_shows_whole_columns_and_a_pipe_a_line_per_run(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"long-" * 8 + "name", "short"}
    for name in names:
        config = configure(["debug"], overrides=[f"run.output_dir={output}", f"run.name={name}"])
        with claim_run(config, "k1", Path("data"), owner=Owner("1")):
            pass
    runs.show_runs(config.run)
    title, *rows = capsys.readouterr().out.splitlines()
    assert title.split()[-2:] == ["Validation", "Updated"]
    assert {row.split()[0] for row in rows} == names
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    runs.show_runs(config.run)
    title, *lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert title.split() == ["Run", "Step", "State", "Loss", "Validation", "Updated"]
    (row,) = [line.split() for line in lines if line.startswith("short")]
    assert row[1:3] == [f"0/{config.training.max_steps}", "interrupted"]
    assert re.fullmatch(r"[\d-]{10} [\d:]{5}", " ".join(row[3:]))


def test_the_runs_as_json_have_what_the_table_shows(
    output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure(["debug"], overrides=[f"run.output_dir={output}", "run.name=first"])
    with claim_run(config, "k1", Path("data"), owner=Owner("1")) as run_dir:
        runs.show_runs_as_json(config.run)
    (run,) = json.loads(capsys.readouterr().out)
    assert (run["name"], run["state"], run["step"]) == ("first", "running", 0)
    assert Path(run["run_dir"]) == run_dir
    assert run["total"] == config.training.max_steps
    assert run["train_loss"] is None
    assert datetime.fromisoformat(run["updated"]).tzinfo is not None


@pytest.mark.parametrize("deployment", [None, UUID(int=3)])
def test_a_flow_run_of_a_deployment_adopts_no_other_run(deployment: UUID | None) -> None:
    assert current_owner() == Owner(None, adopts=True)
    flow_run = FlowRun(id=UUID(int=1), flow_id=UUID(int=2), deployment_id=deployment)
    with FlowRunContext.model_construct(flow_run=flow_run):
        owner = current_owner()
    assert owner.id == str(flow_run.id)
    assert owner.adopts is (deployment is None)
