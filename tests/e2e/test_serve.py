"""`infini serve`: server, MLflow page, worker and deployments start and stop together."""

import json
import signal
import socket
import urllib.request
from collections.abc import Callable
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
    processes_about,
    run,
    write_settings,
)
from ports import free_port
from trials import Make, Start

from flows.serving.services import HOST
from infini_model.runtime.runs import owner_of

pytestmark = pytest.mark.slow
DEPLOYMENTS = {"pipeline", "preprocess", "train", "evaluate", "compare"}


@pytest.mark.story
def test_serve_runs_deployments_serves_other_commands_and_stops_all_on_ctrl_c(
    start: Start,
    pipeline: Make,
    alone: Environment,
    with_tables: Callable[[Path], Path],
    tmp_path: Path,
) -> None:
    output = with_tables(tmp_path / "output")
    ports = free_port(), free_port()
    options = ("--port", str(ports[0]), "--mlflow-port", str(ports[1]))
    serving = start("serve", "--output-dir", output, *options)
    serving.wait_for(
        "Ready: run the deployments from the UI. Ctrl-C suspends active runs and stops everything."
    )
    url, page = f"http://{HOST}:{ports[0]}/api", f"http://{HOST}:{ports[1]}"
    assert f"Prefect UI  http://{HOST}:{ports[0]}" in serving.output
    assert f"MLflow      {page}" in serving.output

    deployed = {found["name"]: found for found in api(url, "deployments/filter")}
    assert set(deployed) == DEPLOYMENTS
    (nightly,) = deployed["preprocess"]["schedules"]
    assert nightly["active"]
    assert nightly["schedule"]["cron"] == "0 3 * * *"
    assert not any(deployed[name]["schedules"] for name in DEPLOYMENTS - {"preprocess"})

    # As the UI does it: a flow run of the deployment with parameters, for the worker to pick up.
    tree = pipeline(output, training={"max_steps": 10}, tracking={"mlflow": True})
    path = f"deployments/{deployed['pipeline']['id']}/create_flow_run"
    asked = api(url, path, parameters={"preset": "quickstart", "advanced": tree})
    number = asked["id"]

    def has_ended() -> bool:
        state = api(url, f"flow_runs/{number}", "GET")["state_type"]
        assert state not in ("FAILED", "CRASHED"), log_of(url, number)
        return bool(state == "COMPLETED")

    eventually(has_ended, "the flow run of the deployment")
    assert (output / "runs" / "quickstart-1" / "report.md").is_file()
    assert "quickstart-1" in mlflow_runs(page)
    owner = owner_of(output / "runs" / "quickstart-1")
    assert owner is not None
    assert owner.url == f"http://{HOST}:{ports[0]}/v2/runs/flow-run/{number}"

    # A command in a second terminal finds the server by the output folder.
    settings = write_settings(tmp_path / "settings.yaml", tree)
    beside = run(infini("preprocess", "--config", settings), alone)
    assert beside.returncode == 0, beside.stdout + beside.stderr
    assert "Starting a Prefect server" not in beside.stdout
    assert flow_run(url, beside.stderr)["state_type"] == "COMPLETED"
    refused = run(infini("serve", "--output-dir", output), alone)
    assert refused.returncode == 2
    assert "infini serve is already running for" in refused.stderr

    everyone = serving.tree()
    serving.process.send_signal(signal.SIGINT)
    assert serving.wait() in (0, 130)
    assert "Traceback" not in serving.output
    eventually(lambda: not alive(everyone), "the end of all processes")
    eventually(lambda: not processes_about(output), "the end of all processes")
    for port in ports:
        with socket.create_server((HOST, port)):
            pass


def log_of(url: str, number: str) -> str:
    """What a flow run logged."""
    wanted = {"logs": {"flow_run_id": {"any_": [number]}}}
    return "\n".join(line["message"] for line in api(url, "logs/filter", **wanted))


def mlflow_runs(page: str) -> set[str]:
    """The names of the runs in MLflow."""
    found = "api/2.0/mlflow/experiments/get-by-name?experiment_name=infini-llama"
    with urllib.request.urlopen(f"{page}/{found}", timeout=PATIENCE) as answer:
        experiment = json.load(answer)["experiment"]["experiment_id"]
    runs = api(f"{page}/api/2.0/mlflow", "runs/search", experiment_ids=[experiment])
    return {run["info"]["run_name"] for run in runs["runs"]}
