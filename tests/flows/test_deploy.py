"""Deployments and flow runs on a real server: what follows the code, what people edited, and
what becomes of runs whose engine is dead."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from commands import Environment, eventually, infini_here
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import actions, filters
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Cancelling, Crashed, Failed, Pending, Running, Suspended
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker

from flows.presets import configure
from flows.serving import deploy as module
from flows.serving import engine, reconcile
from flows.serving.deploy import WORK_POOL, deploy, job_template
from flows.serving.engine import lock_of, log_of
from flows.serving.reconcile import WORKER_KILLED, WORKER_MESSAGE, settle
from infini_model.runtime.claims import claim_run
from infini_model.runtime.holders import Owner
from infini_model.runtime.storage import lock, make_folder, write_json
from infini_model.training.mlflow_record import open_tracking
from tasks.shard import NEW_DATASET

PREFECT_YAML = """
deployments:
  - name: train
    description: Trains.
    entrypoint: flows/train.py:train
    parameters: {preset: quickstart}
    tags: [infini]
    work_pool: {name: infini, work_queue_name: default}
  - name: preprocess
    description: Makes a dataset.
    entrypoint: flows/preprocess.py:preprocess
    schedules: [{cron: "0 3 * * *", timezone: UTC}]
    work_pool: {name: infini, work_queue_name: preprocess}
pull:
  - prefect.deployments.steps.set_working_directory: {directory: "{{ $PWD }}"}
"""
CRASH = "infini: crash runs without heartbeat"
TRAIN = "infini: train on every new dataset"


def write_flow(project: Path, name: str, parameters: str) -> None:
    text = f"from prefect import flow\n\n@flow(name={name!r})\ndef {name}({parameters}): pass\n"
    (project / "flows" / f"{name}.py").write_text(text)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with two small flows, in place of this one."""
    (tmp_path / "flows").mkdir()
    (tmp_path / "deployments").mkdir()
    shutil.copy(module.PROJECT / "deployments" / "automations.yaml", tmp_path / "deployments")
    (tmp_path / "deployments" / "prefect.yaml").write_text(PREFECT_YAML)
    write_flow(tmp_path, "train", "preset: str = 'debug', dataset: str = '', steps: int = 1")
    write_flow(tmp_path, "preprocess", "preset: str = 'debug'")
    monkeypatch.setattr(module, "PROJECT", tmp_path)
    return tmp_path


@pytest.fixture
def client(server: str) -> Iterator[SyncPrefectClient]:
    with temporary_settings({PREFECT_API_URL: server}), get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def deployed(server: str, project: Path) -> str:
    """The API of a server to which the small flows have been deployed, with nothing edited."""
    deploy(server, reset=True)
    return server


def read(client: SyncPrefectClient, name: str) -> DeploymentResponse:
    return client.read_deployment_by_name(f"{name}/{name}")


def crons(deployment: DeploymentResponse) -> dict[str, bool]:
    return {each.schedule.cron: each.active for each in deployment.schedules}  # type: ignore[union-attr]


def automation(client: SyncPrefectClient, name: str) -> Any:
    (found,) = client.read_automations_by_name(name)
    return found


def edit(client: SyncPrefectClient) -> None:
    """What a person does in the UI: parameters, tags, limit, pause, and both kinds of schedule."""
    train, preprocess = read(client, "train"), read(client, "preprocess")
    given = {"preset": "stable", "steps": 7}
    changes = DeploymentUpdate(parameters=given, tags=["mine"], paused=True, concurrency_limit=2)
    client.update_deployment(train.id, changes)
    cron = CronSchedule(cron="0 5 * * 1")
    weekly = actions.DeploymentScheduleCreate(schedule=cron, active=False)
    client.create_deployment_schedules(train.id, [weekly])
    client.delete_deployment_schedule(preprocess.id, preprocess.schedules[0].id)


def test_edits_stay_while_the_code_moves_on_and_reset_undoes_them(
    deployed: str, project: Path, client: SyncPrefectClient, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(client)
    client.resume_automation(automation(client, TRAIN).id)

    def everything() -> list[Any]:
        automations = [automation(client, name) for name in (CRASH, TRAIN)]
        things = [client.read_work_pool(WORK_POOL), read(client, "train"), *automations]
        return [thing.model_dump(exclude={"last_polled"}) for thing in things]

    edited, before = everything(), read(client, "train")
    deploy(deployed)
    assert everything() == edited

    # Of another size: Python tells a new file from the compiled one by the second and the size.
    write_flow(project, "train", "preset: str = 'debug', steps: int = 1, rate: float = 0.125")
    moved = PREFECT_YAML.replace("Trains.", "Trains a model.").replace("quickstart", "arxiv")
    (project / "deployments" / "prefect.yaml").write_text(moved)
    deploy(deployed)
    train = read(client, "train")
    assert train.description == "Trains a model."
    assert set(train.parameter_openapi_schema["properties"]) == {"preset", "steps", "rate"}
    (step,) = train.pull_steps or []
    assert [*step.values()] == [{"directory": str(project)}]
    changed = [key for key, value in before if value != getattr(train, key)]
    follow = {"description", "parameter_openapi_schema", "version", "pull_steps", "updated"}
    assert {"version"} <= set(changed) <= follow
    assert (train.parameters, train.tags) == ({"preset": "stable", "steps": 7}, ["mine"])
    assert crons(train) == {"0 5 * * 1": False}
    assert crons(read(client, "preprocess")) == {}
    assert automation(client, TRAIN).enabled

    client.delete_deployment(read(client, "preprocess").id)
    client.delete_automation(automation(client, TRAIN).id)
    told = f"preprocess, {TRAIN}: deleted on the server and not created again; infini deploy"
    for _ in range(2):
        deploy(deployed)
        assert capsys.readouterr().out.startswith(told)
    with pytest.raises(ObjectNotFound):
        read(client, "preprocess")
    assert client.read_automations_by_name(TRAIN) == []

    deploy(deployed, reset=True)
    train = read(client, "train")
    assert train.id == before.id
    assert (train.parameters, train.tags) == ({"preset": "arxiv"}, ["infini"])
    assert not train.paused
    assert train.global_concurrency_limit is None
    assert crons(train) == {}
    assert crons(read(client, "preprocess")) == {"0 3 * * *": True}
    assert not automation(client, TRAIN).enabled


def test_edits_that_no_longer_fit_are_told_and_a_deployment_in_another_pool_is_left_alone(
    deployed: str, project: Path, client: SyncPrefectClient, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(client)
    write_flow(project, "train", "preset: str = 'debug'")
    deploy(deployed)
    assert read(client, "train").parameters == {"preset": "stable"}
    told = "train: dropped parameters that the flow no longer has: ['steps']"
    assert told in capsys.readouterr().out
    write_flow(project, "train", "preset: int = 1")
    write_flow(project, "preprocess", "preset: str = 'debug', name: str = ''")
    deploy(deployed)
    assert "infini deploy --reset" in capsys.readouterr().out
    assert read(client, "train").parameters == {"preset": "stable"}
    assert "name" in read(client, "preprocess").parameter_openapi_schema["properties"]

    pool = actions.WorkPoolCreate(name="elsewhere", type="process", base_job_template={})
    client.create_work_pool(pool, overwrite=True)
    moved = DeploymentUpdate(work_pool_name="elsewhere")
    client.update_deployment(read(client, "train").id, moved)
    before = read(client, "train")
    write_flow(project, "train", "preset: str = 'debug'")
    deploy(deployed)
    assert read(client, "train") == before


INJECTED = {
    "command": "touch /tmp/injected",
    "env": {"LD_PRELOAD": "/tmp/evil.so", "PYTHONPATH": "/tmp"},
    "env.PYTHONSTARTUP": "/tmp/evil.py",
    "working_dir": "/tmp",
}


def injected_configuration(client: SyncPrefectClient) -> ProcessJobConfiguration:
    template = client.read_work_pool(WORK_POOL).base_job_template
    worker = SimpleNamespace(read_deployment=None)
    made = ProcessJobConfiguration.from_template_and_values(template, INJECTED, client=worker)
    return asyncio.run(made)


def test_the_server_refuses_job_variables_and_the_worker_ignores_those_that_came_past_it(
    deployed: str, client: SyncPrefectClient, project: Path
) -> None:
    train = read(client, "train").id
    for name, value in INJECTED.items():
        with pytest.raises(PrefectHTTPStatusError, match="422"):
            client.create_flow_run_from_deployment(train, job_variables={name: value})
    # A pool of an earlier version, whose template is Prefect's own.
    open_template = ProcessWorker.get_default_base_job_template()
    client.update_work_pool(WORK_POOL, actions.WorkPoolUpdate(base_job_template=open_template))
    assert injected_configuration(client).command == INJECTED["command"]
    deploy(deployed)
    configuration = injected_configuration(client)
    assert configuration.command == job_template()["job_configuration"]["command"]
    assert configuration.command.endswith(" -m flows.serving.engine")
    assert configuration.env == {}
    assert configuration.working_dir == project


def send_event(
    client: SyncPrefectClient, name: str, resource: str, seconds_ago: float = 0.0, **fields: Any
) -> None:
    event = {
        "id": str(uuid4()),
        "event": name,
        "occurred": (datetime.now(UTC) - timedelta(seconds=seconds_ago)).isoformat(),
        "resource": {"prefect.resource.id": resource},
        **fields,
    }
    client.request("POST", "/events", json=[event])


def runs_of(client: SyncPrefectClient, deployment: UUID) -> list[FlowRun]:
    wanted = filters.DeploymentFilter(id=filters.DeploymentFilterId(any_=[deployment]))
    return client.read_flow_runs(deployment_filter=wanted)


def test_a_new_dataset_in_a_store_starts_a_training_by_its_address(
    deployed: str, client: SyncPrefectClient
) -> None:
    train = read(client, "train").id
    for old in runs_of(client, train):
        client.delete_flow_run(old.id)
    client.resume_automation(automation(client, TRAIN).id)
    address = "s3://bucket/datasets/new-1234"
    payload = {"folder": "/cache/new-1234", "address": address, "key": "1234"}

    def started() -> bool:
        # Prefect answers before its triggers know of the change: one event could be too early.
        send_event(client, NEW_DATASET, "infini.dataset.1234", payload=payload)
        return bool(runs_of(client, train))

    eventually(started, "a training on the new dataset")
    client.pause_automation(automation(client, TRAIN).id)
    for flow_run in runs_of(client, train):
        assert flow_run.parameters == {"preset": "quickstart", "dataset": address}
        client.delete_flow_run(flow_run.id)


@pytest.mark.story
def test_a_run_whose_heartbeats_end_is_crashed(deployed: str, client: SyncPrefectClient) -> None:
    definition = automation(client, CRASH).model_dump(exclude={"id", "owner_resource"})
    # As short as Prefect allows.
    definition["trigger"]["within"] = timedelta(seconds=10)
    quick = AutomationCore(**definition | {"name": "quick", "enabled": True})
    automation_id = client.create_automation(quick)
    flow_ids = {name: client.create_flow_from_name(name) for name in ("stranger", "train")}

    def beat_once(name: str, seconds_ago: float) -> UUID:
        running = {"flow_id": str(flow_ids[name]), "state": {"type": "RUNNING"}}
        flow_run = UUID(client.request("POST", "/flow_runs/", json=running).json()["id"])
        related = {
            "prefect.resource.id": f"prefect.flow.{flow_ids[name]}",
            "prefect.resource.role": "flow",
            "prefect.resource.name": name,
        }
        resource = f"prefect.flow-run.{flow_run}"
        heartbeat = "prefect.flow-run.heartbeat"
        send_event(client, heartbeat, resource, seconds_ago, related=[related])
        return flow_run

    def kind(flow_run: UUID) -> StateType | None:
        return client.read_flow_run(flow_run).state_type

    pairs: list[tuple[UUID, UUID]] = []

    def crashed() -> bool:
        # Prefect answers before its triggers know of the change: the first pairs may be too early.
        # The stranger has been silent for longer: if it were to crash, it would be the first.
        pairs.append((beat_once("stranger", 5.0), beat_once("train", 0.0)))
        return any(kind(train) is StateType.CRASHED for _, train in pairs)

    try:
        eventually(crashed, "the end of a silent run")
        assert all(kind(stranger) is StateType.RUNNING for stranger, _ in pairs)
    finally:
        client.delete_automation(automation_id)


def test_the_command_deploys_the_project(connected: Environment, client: SyncPrefectClient) -> None:
    done = infini_here("deploy", "--reset", env=connected)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "Deployed."), done.stderr
    watched = automation(client, CRASH).trigger.match_related.root["prefect.resource.name"]
    assert sorted(watched) == ["compare", "evaluate", "pipeline", "preprocess", "train"]
    for name in watched:
        found = read(client, name)
        assert found.description
        assert set(found.parameters) <= set(found.parameter_openapi_schema["properties"])
        assert found.work_queue_name == ("preprocess" if name == "preprocess" else "default")
    # Only this machine reaches the server; the other costs money.
    assert not automation(client, CRASH).enabled
    assert not automation(client, TRAIN).enabled


@flow
def never_run() -> None:
    """The flow of runs that have no engine; locked files stand for the engines of others."""


def begin(client: SyncPrefectClient, state: State) -> str:
    """A flow run in a state; the id."""
    created = client.create_flow_run(never_run, state=Pending())
    client.set_flow_run_state(created.id, Running(), force=True)
    client.set_flow_run_state(created.id, state, force=True)
    return str(created.id)


def test_flow_runs_whose_engine_has_ended_get_their_true_state_and_leave_no_files(
    client: SyncPrefectClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = make_folder(tmp_path / "engines")
    config = configure(["debug"], overrides=[f"run.output_dir={tmp_path}"])

    def end(state: State) -> str:
        number = begin(client, state)
        lock_of(engines, number).touch()
        return number

    killed, cancelling = end(Running()), end(Cancelling())
    by_worker = end(Crashed(message=f"{WORKER_KILLED}Process was killed."))
    # Far beyond the end of this test: Prefect fails a run whose limit has passed.
    suspended = end(Suspended(timeout_seconds=86_400))
    failed, cancelled = end(Failed(message="no")), end(Cancelled(message=WORKER_MESSAGE))
    deleted, alive, elsewhere = end(Running()), begin(client, Running()), begin(client, Running())
    client.delete_flow_run(UUID(deleted))
    task = {"task_key": "train", "dynamic_key": "0", "state": {"type": "RUNNING"}}
    tasks = {
        each: client.request("POST", "/task_runs/", json=task | {"flow_run_id": each}).json()["id"]
        for each in (killed, by_worker, cancelling, alive)
    }
    log_of(lock_of(engines, by_worker)).write_text("the last words")
    with claim_run(config, "k1", Path("data"), owner=Owner(cancelled)) as run_dir:
        make_folder(run_dir / "checkpoints" / "step-7")

    def states(*numbers: str) -> list[tuple[str, str]]:
        found = [client.read_flow_run(UUID(number)).state for number in numbers]
        return [(each.name, each.message or "") for each in found if each]

    with lock(lock_of(engines, alive)):
        assert len(list(settle(client, engines, config))) == 4
        assert list(settle(client, engines, config)) == []
        crashed = ("Crashed", "Its process was killed; the same command continues it")
        assert states(killed, by_worker) == [crashed] * 2
        saved = [("Cancelled", "Cancelled"), ("Cancelled", "Cancelled; step 7 is saved")]
        assert states(cancelling, cancelled) == saved
        assert states(alive, elsewhere, failed) == [("Running", "")] * 2 + [("Failed", "no")]
        (paused,) = [client.read_flow_run(UUID(suspended)).state]
        assert (paused.name, paused.state_details.pause_timeout) == ("Suspended", None)
        ends = [client.read_task_run(UUID(tasks[each])).state_name for each in tasks]
        assert ends == ["Crashed", "Crashed", "Cancelled", "Running"]
        number = filters.FlowRunFilterId(any_=[UUID(by_worker)])
        (explained,) = client.read_artifacts(flow_run_filter=filters.FlowRunFilter(id=number))
        assert explained.key == "failure"
        assert explained.description.startswith("Open this first: Its process was killed")
        assert "\n\nThe same command continues it.\n\n" in explained.data
        assert "the last words" in explained.data

        monkeypatch.setattr(reconcile, "SETTLED", timedelta())
        assert list(settle(client, engines, config)) == []
        assert {path.name for path in engines.iterdir()} == {f"{suspended}.lock", f"{alive}.lock"}


def test_what_continues_a_dead_flow_run_is_named_and_no_other_run_is_touched(
    deployed: str, client: SyncPrefectClient, tmp_path: Path
) -> None:
    config = configure(["debug"], overrides=[f"run.output_dir={tmp_path}"])
    created = client.create_flow_run_from_deployment(read(client, "train").id)
    client.set_flow_run_state(created.id, Running(), force=True)
    of_deployment, of_command, broken = str(created.id), begin(client, Running()), "no number"
    for number in (of_deployment, of_command, broken):
        lock_of(tmp_path, number).touch()
    with claim_run(config, "k1", Path("data"), owner=Owner(of_command)) as run_dir:
        make_folder(run_dir / "checkpoints" / "step-3")
        with lock(run_dir / "checkpoints" / ".lock"):  # its training has not ended yet
            lines = list(settle(client, tmp_path, config))
    assert len(lines) == 2
    lines += settle(client, tmp_path, config)
    why = "Its process was killed"
    assert any(line.endswith(f": {why}; Retry continues it") for line in lines)
    named = f": {why}; step 3 is saved; infini resume {run_dir.name} continues it"
    assert lines[2].endswith(named) or lines[3].endswith(named)
    # One that cannot be corrected is told, and is in nobody's way.
    assert sum(line.startswith(f"Flow run {broken} cannot be corrected: ") for line in lines) == 2


def test_a_killed_command_that_another_server_knows_has_ended_in_mlflow(
    client: SyncPrefectClient, tmp_path: Path, with_tables: Callable[[Path], Path]
) -> None:
    config = configure(["debug"], overrides=[f"run.output_dir={with_tables(tmp_path)}"])
    path = lock_of(tmp_path, str(uuid4()))
    path.touch()
    with claim_run(config, "k1", Path("data"), owner=Owner(path.stem)) as run_dir:
        mlflow, experiment = open_tracking(config)
        number = mlflow.create_run(experiment).info.run_id
        known = {"run_id": number, "tracking_uri": config.tracking_uri, "status": "RUNNING"}
        write_json(run_dir / "logs" / "mlflow.json", known)
    with lock(make_folder(run_dir / "checkpoints") / ".lock"):  # its training has not ended yet
        assert list(settle(client, tmp_path, config)) == []
    (line,) = settle(client, tmp_path, config)
    named = f"infini resume {run_dir.name} continues it"
    assert line == f"Run {run_dir.name}: its process was killed; {named}"
    assert mlflow.get_run(number).info.status == "FAILED"
    assert not path.exists()


def test_an_engine_that_waits_for_the_one_before_holds_a_file_that_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of an engine that has ended may be removed just then."""
    engines, before, removed = engine.engines_dir(tmp_path), contextlib.ExitStack(), list[Path]()
    path, pause = lock_of(engines, "one"), time.sleep
    before.enter_context(lock(path))

    def sleep_while_it_is_removed(seconds: float) -> None:
        if not removed:
            path.unlink()
            removed.append(path)
            before.close()
        pause(seconds)

    ask = "import sys; from infini_model.runtime import storage; sys.exit(storage.is_locked(PATH))"
    command = [sys.executable, "-c", ask.replace("PATH", repr(str(path)))]
    monkeypatch.setattr(time, "sleep", sleep_while_it_is_removed)
    monkeypatch.setattr(engine, "ENGINE_COMMAND", command)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "one")
    monkeypatch.setenv(engine.ENGINES, str(engines))
    with lock(engine.serve_lock(tmp_path)):
        assert engine.main() == 1
    assert removed == [path]


# An engine that writes down how often it is told to end, and takes its time.
SAVES = """
import pathlib, signal, sys, time
def save(*_):
    with pathlib.Path(sys.argv[1]).open("a") as file:
        file.write("told ")
        file.flush()
        time.sleep(0.5)
        file.write("saved ")
    sys.exit(7)
signal.signal(signal.SIGTERM, save)
print("running", flush=True)
while True: signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_engine_outlives_a_worker_of_ones_own_and_is_told_to_save_once(
    number: signal.Signals, tmp_path: Path, alone: Environment, background: Callable[..., Any]
) -> None:
    saved = tmp_path / "saved"
    program = (
        "import sys; from flows.serving import engine\n"
        f"engine.ENGINE_COMMAND = [sys.executable, '-c', {SAVES!r}, {str(saved)!r}]\n"
        "sys.exit(engine.main())"
    )
    started = background([sys.executable, "-c", program], alone)
    started.wait_for("running")
    started.process.send_signal(number)
    assert started.wait() == (-number if number == signal.SIGKILL else 7)
    eventually(lambda: saved.exists() and saved.read_text() == "told saved ", "a checkpoint")


def test_the_file_of_an_engine_may_be_removed_while_the_running_ones_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(path: Path) -> bool:
        path.unlink()
        return True

    lock_of(tmp_path, "one").touch()
    monkeypatch.setattr(engine, "is_locked", remove)
    assert engine.running_engines(tmp_path) == {}
