"""`infini serve` and its flow runs, through the same API calls as Prefect's UI."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
from commands import (
    PATIENCE,
    WHOLE,
    Environment,
    Running,
    alive,
    answers,
    api,
    eventually,
    infini,
    processes_about,
)
from ports import free_port

from flows.serving.servers import HOST, start_prefect
from infini_model.config import load_config
from infini_model.runtime import processes
from infini_model.runtime.processes import end_tree

PREFECT, MLFLOW = "flows.serving.guard:prefect_app", "flows.serving.guard:mlflow_app"
WORKER = "worker"
ENGINE, TRAINER = "prefect.engine", "infini_model.training"


@dataclass(frozen=True)
class Server:
    """A Prefect server by the address of its API, and what people do to its flow runs."""

    url: str

    def deployment(self, name: str) -> dict[str, Any]:
        return dict(api(self.url, f"deployments/name/{name}/{name}", "GET"))

    def create(self, deployment: str, **parameters: Any) -> str:
        """What *Run* of a deployment does; returns the id of the flow run."""
        path = f"deployments/{self.deployment(deployment)['id']}/create_flow_run"
        return str(api(self.url, path, parameters=parameters)["id"])

    def read(self, flow_run: str) -> dict[str, Any]:
        return dict(api(self.url, f"flow_runs/{flow_run}", "GET"))

    def state(self, flow_run: str) -> dict[str, Any]:
        return dict(self.read(flow_run)["state"])

    def wait_for_state(self, flow_run: str, name: str) -> None:
        eventually(
            lambda: self.state(flow_run)["name"] == name,
            lambda: "\n".join([name, str(self.state(flow_run)), *self.log_of(flow_run)[-30:]]),
            WHOLE,
        )

    def log_of(self, flow_run: str, level: int = 0) -> list[str]:
        """What a flow run has logged, at this level or above."""
        wanted = {"logs": {"flow_run_id": {"any_": [flow_run]}, "level": {"ge_": level}}}
        lines: list[str] = []
        # The server returns 200 lines at most, and a training may log more between two polls.
        while len(lines) % 200 == 0:
            page = api(self.url, "logs/filter", sort="TIMESTAMP_ASC", offset=len(lines), **wanted)
            if not page:
                break
            lines += [line["message"] for line in page]
        return lines

    def wait_for_log(self, flow_run: str, text: str, seconds: float = PATIENCE) -> None:
        eventually(
            lambda: any(text in line for line in self.log_of(flow_run)),
            lambda: f"{text!r} in {self.log_of(flow_run)[-30:]}",
            seconds,
        )

    def artifacts(self, flow_run: str) -> dict[str, Any]:
        """The data of a flow run's artifacts; a key is there once.

        Prefect makes artifacts without a key of results.
        """
        wanted = {"flow_run_id": {"any_": [flow_run]}}
        every = api(self.url, "artifacts/filter", artifacts=wanted)
        found = [each for each in every if each["key"] is not None]
        by_key = {each["key"]: each["data"] for each in found}
        assert len(by_key) == len(found), [each["key"] for each in found]
        return by_key

    def tasks(self, flow_run: str) -> dict[str, dict[str, Any]]:
        """The task runs of the newest attempt, by the first word of their names."""
        wanted = {"flow_runs": {"id": {"any_": [flow_run]}}}
        found = api(self.url, "task_runs/filter", sort="EXPECTED_START_TIME_ASC", **wanted)
        return {each["name"].split()[0]: each for each in found}

    def task_states(self, flow_run: str) -> list[tuple[str, str]]:
        """The names of all task runs of all attempts, each with its state's."""
        wanted = {"flow_runs": {"id": {"any_": [flow_run]}}}
        found = api(self.url, "task_runs/filter", sort="EXPECTED_START_TIME_ASC", **wanted)
        return [(each["name"], each["state_name"]) for each in found]

    def parts(self, flow_run: str) -> list[dict[str, Any]]:
        wanted = {"parent_flow_run_id": {"any_": [flow_run]}}
        return list(api(self.url, "flow_runs/filter", flow_runs=wanted))

    def set_state(self, flow_run: str, kind: str, name: str, **state: Any) -> None:
        """What *Pause*, *Cancel* and *Retry* do."""
        asked = {"type": kind, "name": name} | state
        answer = api(self.url, f"flow_runs/{flow_run}/set_state", state=asked, force=True)
        assert answer["status"] == "ACCEPT", answer

    def suspend(self, flow_run: str) -> None:
        """The *Pause* button, but not for five minutes only, which may pass on a slow machine."""
        until = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        details = {"pause_timeout": until, "pause_reschedule": True}
        self.set_state(flow_run, "PAUSED", "Suspended", state_details=details)

    def resume(self, flow_run: str) -> None:
        assert api(self.url, f"flow_runs/{flow_run}/resume")["status"] == "ACCEPT"

    def cancel(self, flow_run: str) -> None:
        self.set_state(flow_run, "CANCELLING", "Cancelling")

    def retry(self, flow_run: str) -> None:
        self.set_state(flow_run, "SCHEDULED", "AwaitingRetry")


@dataclass(frozen=True)
class Serving(Server):
    """A server with workers: a running command, such as `infini serve`, and its output folder."""

    running: Running
    output: Path

    def processes(self, word: str) -> list[psutil.Process]:
        """Processes of this output folder of which `word` is an argument."""
        found = []
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
                home = process.environ().get("PREFECT_HOME", "")
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            is_guard = processes.__file__ in words
            if home == str(self.output / "prefect") and word in words and not is_guard:
                found.append(process)
        return alive(found)

    def wait_for_end_of(self, word: str) -> None:
        eventually(lambda: not self.processes(word), f"the end of {word}")

    def kill(self, word: str) -> psutil.Process:
        """Send SIGKILL to the only process with `word` among its arguments, and return it.

        Waits for it: a process that starts another one is there twice for a moment.
        """
        found: list[psutil.Process] = []

        def is_single() -> bool:
            found[:] = self.processes(word)
            return len(found) == 1

        eventually(is_single, lambda: f"one {word}, not {found}")
        found[0].kill()
        return found[0]

    def stop(self) -> None:
        """Press Ctrl-C; all its processes must end."""
        everyone = self.running.tree()
        self.running.process.send_signal(signal.SIGINT)
        assert self.running.wait() in (0, 130)
        assert "Traceback" not in self.running.output
        eventually(lambda: not alive(everyone), "the end of all processes")
        eventually(lambda: not processes_about(self.output), "the end of all processes")


@contextmanager
def launcher(
    folder: Path, env: Environment, program: Callable[..., list[str]] = infini
) -> Iterator[Callable[[], Serving]]:
    """Starts `infini serve`, and waits until it is ready, each time on the same ports.

    The output folder is `output` in `folder`. What is left of all at the end is killed.
    """
    output, ports = folder / "output", (free_port(), free_port())
    options = ("--port", str(ports[0]), "--mlflow-port", str(ports[1]))
    started: list[Running] = []

    def launch() -> Serving:
        command = program("serve", "--output-dir", output, *options)
        started.append(Running(command, folder / f"serve-{len(started)}.log", env))
        started[-1].wait_for("Ready: ")
        serving = Serving(f"http://{HOST}:{ports[0]}/api", started[-1], output)
        # Otherwise a test that runs at three in the morning meets an engine that nobody started.
        nightly = serving.deployment("preprocess")["id"]
        api(serving.url, f"deployments/{nightly}/pause_deployment")
        return serving

    try:
        yield launch
    finally:
        for running in started:
            running.end()
        eventually(lambda: not processes_about(folder), "the end of all processes")


@contextmanager
def prefect_server(output: Path) -> Iterator[str]:
    """Run a Prefect server with its database in an output folder; yields the API's address."""
    config = load_config(overrides=[f"run.output_dir={output}"])
    service = start_prefect(config, free_port())
    try:
        eventually(lambda: answers(f"{service.url}/api/health"), "the Prefect server")
        yield f"{service.url}/api"
    finally:
        end_tree(service.process, 10.0)
