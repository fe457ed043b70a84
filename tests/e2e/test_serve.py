"""`infini serve`: what it offers, and trainings that outlive the death of anything around them."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import (
    PATIENCE,
    Environment,
    alive,
    api,
    eventually,
    flow_run,
    infini,
    run,
    succeed,
    write_settings,
)
from curves import repeatable
from llamas import write_llama
from local_hub import LocalHub, Repository, serve_hub
from serving import ENGINE, MLFLOW, PREFECT, TRAINER, WORKER, Serving, launcher
from stopping import Halt
from trials import STEPS, Make

from flows.serving.servers import api_lock
from infini_model.runtime.runs import read_run
from infini_model.runtime.storage import lock
from infini_model.training.mlflow_record import read_mlflow_record
from infini_model.training.run_status import saved_step

pytestmark = pytest.mark.story
# Never reached, as the run is killed; nor is any step logged at which a training halts.
MANY = 1_000_000
LONG = {
    "data": {"tokenizer": {"spec": "bytes"}},
    "training": {"max_steps": MANY},
    "logging": {"logging_steps": MANY, "eval_steps": MANY},
    "checkpoint": {"save_steps": MANY},
    "stages": {"retry_delay_seconds": 0.0},
    "tracking": {"mlflow": True},
}
NIGHTLY, EDITED = "0 3 * * *", {"cron": "30 4 * * *", "timezone": "UTC"}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalHub]:
    """A hub with a small Llama, the weights of which are held."""
    folder = write_llama(tmp_path_factory.mktemp("hub"))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with serve_hub() as server:
        server.repositories["team/llama"] = Repository(files)
        server.held = max(files.values(), key=len)
        yield server
        server.released.set()


@pytest.fixture(scope="module")
def halt(tmp_path_factory: pytest.TempPathFactory) -> Halt:
    """Stops a training once at each of these steps, if it logs them."""
    return Halt(tmp_path_factory.mktemp("halt") / "site", 10, 30, 50, 70)


@pytest.fixture(scope="module")
def launch(
    tmp_path_factory: pytest.TempPathFactory,
    session_environment: Environment,
    with_tables: Callable[[Path], Path],
    hub: LocalHub,
    halt: Halt,
) -> Iterator[Callable[[], Serving]]:
    """Starts `infini serve` with that hub, or starts it again."""
    folder = tmp_path_factory.mktemp("serve")
    with_tables(folder / "output")
    homes = {"PREFECT_HOME": str(folder / "home"), "HF_HOME": str(folder / "hub")}
    # What is held must not be given up.
    timeouts = dict.fromkeys(("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"), f"{PATIENCE:.0f}")
    online = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"} | timeouts
    with launcher(folder, session_environment | homes | online | halt.environment) as launch:
        yield launch


@pytest.fixture(scope="module")
def serving(launch: Callable[[], Serving]) -> Serving:
    """The first `infini serve`; the last test ends it."""
    return launch()


def test_other_commands_find_the_server_by_the_output_folder(
    serving: Serving, pipeline: Make, alone: Environment, tmp_path: Path
) -> None:
    settings = write_settings(tmp_path / "settings.yaml", pipeline(serving.output))
    beside = succeed(infini("preprocess", "--config", settings), alone)
    assert "Starting a Prefect server" not in beside.stdout
    assert flow_run(serving.url, beside.stderr)["state_type"] == "COMPLETED"
    refused = run(infini("serve", "--output-dir", serving.output), alone)
    assert refused.returncode == 2
    running = f"infini serve is already running for {serving.output} at {serving.url}"
    assert running in refused.stderr
    record = api_lock(serving.output / "prefect", 8000)
    with lock(record):  # as infini api does
        record.write_text("http://127.0.0.1:8000/v1  a-run")
        serving.running.wait_for("OpenAI API  http://127.0.0.1:8000/v1  a-run")


def test_a_killed_download_is_retried_and_a_killed_engine_is_recorded_everywhere(
    serving: Serving, hub: LocalHub, pipeline: Make
) -> None:
    from mlflow import MlflowClient

    tree = pipeline(serving.output, **LONG)
    training = serving.create(
        "pipeline", preset="uptrain", initial_weights="team/llama", advanced=tree
    )
    serving.wait_for_log(training, "% of ")
    serving.kill("weights")
    serving.wait_for_log(training, "weights ended with status -9")
    hub.released.set()
    run_dir = serving.output / "runs" / "uptrain-1"
    eventually(lambda: "run_id" in read_mlflow_record(run_dir), "MLflow's run")
    assert serving.artifacts(training)["weights-progress"] == 100.0
    # The server records it in the background.
    eventually(lambda: serving.tasks(training)["weights"]["run_count"] == 2, "two attempts")

    def mlflow_status() -> str:
        record = read_mlflow_record(run_dir)
        return MlflowClient(record["tracking_uri"]).get_run(record["run_id"]).info.status

    eventually(lambda: mlflow_status() == "RUNNING", "MLflow's record")
    serving.kill(ENGINE)
    serving.wait_for_state(training, "Crashed")
    serving.wait_for_end_of(TRAINER)
    eventually(lambda: mlflow_status() == "FAILED", "MLflow's record")
    assert serving.tasks(training)["train"]["state_name"] == "Crashed"
    message = serving.state(training)["message"]
    assert message.endswith("; Retry continues it")
    assert "Retry continues it" in serving.artifacts(training)["failure"]
    assert message in serving.running.output


def test_a_training_survives_servers_worker_and_infini_serve_itself_to_the_same_bits(
    launch: Callable[[], Serving], serving: Serving, halt: Halt, undisturbed: Path, pipeline: Make
) -> None:
    schedules = f"deployments/{serving.deployment('preprocess')['id']}/schedules"
    (nightly,) = api(serving.url, schedules, "GET")
    assert nightly["schedule"]["cron"] == NIGHTLY
    api(serving.url, f"{schedules}/{nightly['id']}", "PATCH", schedule=EDITED)

    # What this preset has beside the settings of `undisturbed` decides no weights.
    tree = pipeline(serving.output, checkpoint={"save_steps": 10 * STEPS}, logging={"debug": False})
    training = serving.create("pipeline", preset="debug", advanced=tree)
    run_dir = serving.output / "runs" / "debug-1"
    (trainer,) = halt.wait()
    assert read_run(run_dir).owner == training
    # It must not be marked as crashed while it trains.
    serving.set_state(training, "CRASHED", "Crashed")
    serving.wait_for_state(training, "Running")

    # It goes on while nothing else does; then all is there again, the worker last.
    killed = {name: serving.kill(name) for name in (PREFECT, MLFLOW, WORKER)}
    halt.resume()
    serving.running.wait_for("the Prefect server has exited (-9)")
    for name, dead in killed.items():
        eventually(lambda: serving.processes(name) not in ([], [dead]), f"another {name}")  # noqa: B023
    assert halt.wait() == [trainer]
    assert serving.state(training)["name"] == "Running"

    # The worker that started the run is dead, so only the run itself can see the suspension.
    serving.suspend(training)
    halt.resume_told()
    serving.wait_for_end_of(ENGINE)
    state, step = serving.state(training), saved_step(run_dir) or 0
    assert (state["name"], 30 <= step < 50) == ("Suspended", True)
    assert state["message"].startswith(f"Suspended; step {step} is saved")
    assert state["state_details"]["pause_timeout"] is None

    serving.resume(training)
    halt.wait()
    serving.wait_for_log(training, f"Resuming from: {run_dir}/checkpoints/step-{step}")
    with ThreadPoolExecutor() as pool:
        stopping = pool.submit(serving.stop)
        halt.resume_told()
        stopping.result()

    # It takes the ports of the one that has ended, and leaves what was edited.
    serving, step = launch(), saved_step(run_dir)
    (nightly,) = api(serving.url, schedules, "GET")
    assert nightly["schedule"]["cron"] == EDITED["cron"]
    state = serving.state(training)
    assert state["name"] == "Suspended"
    assert f"step {step} is saved" in state["message"]
    serving.resume(training)
    (trainer,) = halt.wait()
    everyone = [*serving.running.tree(), *serving.processes(ENGINE), trainer]
    serving.running.process.kill()
    halt.resume_told()
    eventually(lambda: not alive(everyone), "the end of all processes")

    serving = launch()
    assert serving.state(training)["name"] == "Crashed"
    serving.retry(training)
    serving.wait_for_state(training, "Completed")
    assert [path.name for path in run_dir.parent.glob("debug-*")] == [run_dir.name]
    assert repeatable(run_dir) == repeatable(undisturbed)
    serving.stop()
