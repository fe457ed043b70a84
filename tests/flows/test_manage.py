"""`infini runs`, `resume`, `cancel` and `logs` on real runs, however they were started."""

import re
import signal
import sys
from collections.abc import Callable, Iterator
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
    run,
    tiny,
    write_settings,
)
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from stopping import Halt, is_pending

from flows import manage
from flows.presets import configure
from infini_model.config import load_config
from infini_model.runtime.claims import claim_run
from infini_model.runtime.errors import UserError
from infini_model.runtime.runs import is_finished, owner_of, record_evaluation, run_holder
from infini_model.training.run_status import saved_step
from tasks.flow_run import current_owner

Started = Callable[..., Running]
# A flow run at work, as long as its state allows.
WORKING = """
import sys
from pathlib import Path
from prefect.client.orchestration import get_client
from flows.presets import configure
from flows.serving.polling import poll
from infini_model.runtime.claims import claim_run
from infini_model.runtime.holders import Owner
output, number = sys.argv[1:]
config = configure(["debug"], overrides=[f"run.output_dir={output}"])
with claim_run(config, "k1", Path("data"), owner=Owner(number, None), adopt=False):
    with get_client(sync_client=True) as client:
        poll(lambda: client.read_flow_run(number).state.type == "CANCELLING", every_seconds=0.1)
"""


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output"


@pytest.fixture
def start(tmp_path: Path, connected: Environment) -> Iterator[Started]:
    """Start a command in the background; what is left of it is killed at the end of the test."""
    started: list[Running] = []

    def begin(*command: str | Path, **environment: str) -> Running:
        log = tmp_path / f"log-{len(started)}"
        started.append(Running(list(map(str, command)), log, connected | environment))
        return started[-1]

    yield begin
    for running in started:
        running.end()


@pytest.fixture
def told(output: Path, connected: Environment) -> Callable[..., tuple[int, str]]:
    """Run a command on the output folder: its exit status and all that it printed."""

    def tell(*arguments: str) -> tuple[int, str]:
        done = run(infini(*arguments, "--output-dir", output), connected)
        assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
        return done.returncode, done.stdout + done.stderr

    return tell


@pytest.mark.slow
@pytest.mark.story
def test_a_run_is_listed_cancelled_and_resumed_from_another_terminal(
    start: Started,
    told: Callable[..., tuple[int, str]],
    output: Path,
    text_files: Path,
    tmp_path: Path,
    connected: Environment,
) -> None:
    tree = tiny(
        text_files,
        output,
        launch={"hang_timeout_seconds": PATIENCE},
        checkpoint={"save_steps": 20},
    )
    settings = write_settings(tmp_path / "settings.yaml", tree)
    dataset_of(settings)
    halt = Halt(tmp_path / "halt", 5)
    running = start(*infini("train", "--config", settings), **halt.environment)
    run_dir = output / "runs" / "run-1"
    (trainer,) = halt.wait()
    followed = start(*infini("logs", "run-1", "--follow", "--output-dir", output))
    followed.wait_for("Step [5/20]")

    holder = f"process {running.process.pid} (flow run "
    _, table = told("runs")
    (row,) = [line for line in table.splitlines() if "run-1" in line]
    assert re.search(rf"^run-1 +5/20 +running: process {running.process.pid} ", row)
    owner = owner_of(run_dir)
    assert owner is not None
    assert owner.url is not None
    assert row.rstrip().endswith(owner.url)
    status, line = told("resume", "run-1")
    assert status == 2
    assert f"{run_dir} is in use by {holder}" in line
    assert len(line.splitlines()) == 1

    cancelling = start(*infini("cancel", "run-1", "--output-dir", output))
    eventually(lambda: is_pending(trainer, signal.SIGTERM), lambda: cancelling.output)
    halt.resume()
    assert running.wait() == 130, running.output
    saved = saved_step(run_dir)
    assert saved is not None
    assert 5 <= saved < 20
    assert cancelling.wait() == 0
    last = cancelling.output.splitlines()[-1]
    assert last == f"Cancelled run-1; step {saved} is saved"
    assert followed.wait() == 0
    assert f"Step [{saved}/20]" in followed.output
    assert "interrupted" in told("runs")[1]
    assert told("cancel", "run-1") == (2, f"error: {run_dir}: is not running\n")

    status, line = told("resume", "training.learning_rate=1e-5")
    assert status == 2
    assert "cannot be resumed with different settings (training.learning_rate is 0.001" in line
    status, printed = told("resume", "logging.logging_steps=50")
    assert status == 0, printed
    assert f"Resuming from: {run_dir}/checkpoints/step-{saved}" in printed
    assert f"Report: {run_dir}/report.md" in printed.splitlines()
    assert is_finished(run_dir)
    assert owner_of(run_dir) != owner
    assert told("resume", "run-1") == (0, f"{run_dir} is already finished; nothing to do\n")
    status, line = told("resume")
    assert (status, line) == (2, f"error: {output}/runs: there is no interrupted run to resume\n")
    assert f"Step [{saved}/20]" in told("logs")[1]


@pytest.fixture
def flow_run(connected: Environment, server: str) -> str:
    """A flow run of a deployment, Running as far as Prefect knows."""
    flow = api(server, "flows/", name="managed")["id"]
    deployment = api(server, "deployments/", name="managed", flow_id=flow)["id"]
    asked = api(server, f"deployments/{deployment}/create_flow_run", state={"type": "RUNNING"})
    return str(asked["id"])


def test_the_flow_run_of_a_deployment_is_cancelled_through_prefect(
    start: Started, told: Callable[..., tuple[int, str]], output: Path, server: str, flow_run: str
) -> None:
    working = start(sys.executable, "-c", WORKING, output, flow_run)
    run_dir = output / "runs" / "debug-1"
    eventually(lambda: run_holder(run_dir) is not None, "the claim")
    status, line = told("cancel", str(run_dir))
    assert (status, line.splitlines()[-1]) == (0, "Cancelled debug-1; nothing is saved")
    # Not by a signal: that would have ended it with another status.
    assert working.wait() == 0, working.output
    assert api(server, f"flow_runs/{flow_run}", "GET")["state_type"] == "CANCELLING"


def test_what_is_not_there_is_named(output: Path) -> None:
    places = load_config(overrides=[f"run.output_dir={output}"]).run
    for named in ("run-9", None):
        with pytest.raises(UserError, match="there is no such run; infini runs lists them"):
            manage.find_run_folder(places, named)
    config = configure(["debug"], overrides=[f"run.output_dir={output}"])
    with claim_run(config, "k1", Path("data")) as run_dir:
        record_evaluation(run_dir, config.training.max_steps, "k1", {})
    assert manage.to_resume(places, [run_dir.name]) == (run_dir, None)
    with pytest.raises(UserError, match="there is no interrupted run to resume"):
        manage.to_resume(places, ["launch.gpus=cpu"])
    with pytest.raises(UserError, match="is not running"):
        manage.cancel(run_dir)
    with pytest.raises(UserError, match="there are no logs yet"):
        manage.print_logs(manage.find_run_folder(places, None), follow=True)


@pytest.mark.parametrize("deployment", [None, UUID(int=3)])
def test_a_flow_run_of_a_deployment_adopts_no_other_run(deployment: UUID | None) -> None:
    assert current_owner() == (None, True)
    flow_run = FlowRun(id=UUID(int=1), flow_id=UUID(int=2), deployment_id=deployment)
    with FlowRunContext.model_construct(flow_run=flow_run):
        owner, adopt = current_owner()
    assert owner is not None
    assert owner.id == str(flow_run.id)
    assert adopt is (deployment is None)
