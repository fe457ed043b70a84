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
from commands import Running, alive, answers, api, eventually
from ports import free_port

from flows.serving.services import HOST, start_prefect
from infini_model.config import load_config
from infini_model.runtime.processes import end_tree

PREFECT, MLFLOW = "flows.serving.guard:prefect_app", "flows.serving.guard:mlflow_app"
WORKER = "worker"
ENGINE, TRAINER = "prefect.engine", "infini_model.training"


@dataclass(frozen=True)
class Serving:
    """A running `infini serve`, its output folder and its API."""

    running: Running
    output: Path
    url: str

    def processes(self, word: str) -> list[psutil.Process]:
        """Processes of this output folder of which `word` is an argument."""
        found = []
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
                home = process.environ().get("PREFECT_HOME", "")
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            if (
                home == str(self.output / "prefect")
                and "infini_model.runtime.processes" not in words
            ):
                found += [process] if word in words else []
        return alive(found)

    def process(self, word: str) -> psutil.Process:
        """The only process with `word` among its arguments.

        Waits for it: a process that starts another one is there twice for a moment.
        """
        found: list[psutil.Process] = []

        def is_single() -> bool:
            found[:] = self.processes(word)
            return len(found) == 1

        eventually(is_single, lambda: f"one {word}, not {found}")
        return found[0]

    def kill(self, word: str) -> psutil.Process:
        """Send SIGKILL to the only process with `word` among its arguments, and return it."""
        process = self.process(word)
        process.kill()
        return process

    def create(self, deployment: str, **parameters: Any) -> str:
        """What *Run* of a deployment does; returns the id of the flow run."""
        path = f"deployments/{self.deployment(deployment)}/create_flow_run"
        return str(api(self.url, path, parameters=parameters)["id"])

    def deployment(self, name: str) -> str:
        """The id of a deployment."""
        (found,) = [each for each in api(self.url, "deployments/filter") if each["name"] == name]
        return str(found["id"])

    def state(self, flow_run: str) -> dict[str, Any]:
        """The state of a flow run."""
        return dict(api(self.url, f"flow_runs/{flow_run}", "GET")["state"])

    def wait_for_state(self, flow_run: str, name: str) -> dict[str, Any]:
        """Wait until the state is `name` and return it."""
        eventually(
            lambda: self.state(flow_run)["name"] == name,
            lambda: (
                f"{name}, not {self.state(flow_run)}\n" + "\n".join(self.log_of(flow_run)[-30:])
            ),
        )
        return self.state(flow_run)

    def log_of(self, flow_run: str) -> list[str]:
        """What a flow run has logged."""
        wanted = {"logs": {"flow_run_id": {"any_": [flow_run]}}}
        lines: list[str] = []
        # The server returns 200 lines at most, and a training may log more between two polls.
        while len(lines) % 200 == 0:
            page = api(self.url, "logs/filter", sort="TIMESTAMP_ASC", offset=len(lines), **wanted)
            if not page:
                break
            lines += [line["message"] for line in page]
        return lines

    def wait_for_log(self, flow_run: str, text: str) -> None:
        """Wait until a flow run has logged `text`."""
        eventually(
            lambda: any(text in line for line in self.log_of(flow_run)),
            lambda: f"{text!r} in {self.log_of(flow_run)[-30:]}",
        )

    def set_state(self, flow_run: str, kind: str, name: str, **details: Any) -> None:
        """What *Pause*, *Cancel* and *Retry* do."""
        state = {"type": kind, "name": name, "state_details": details}
        answer = api(self.url, f"flow_runs/{flow_run}/set_state", state=state, force=True)
        assert answer["status"] == "ACCEPT", answer

    def suspend(self, flow_run: str) -> None:
        """The *Pause* button, but not for five minutes only, which may pass on a slow machine."""
        until = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        self.set_state(flow_run, "PAUSED", "Suspended", pause_timeout=until, pause_reschedule=True)

    def resume(self, flow_run: str) -> None:
        """The *Resume* button."""
        assert api(self.url, f"flow_runs/{flow_run}/resume")["status"] == "ACCEPT"

    def cancel(self, flow_run: str) -> None:
        """The *Cancel* button."""
        self.set_state(flow_run, "CANCELLING", "Cancelling")

    def retry(self, flow_run: str) -> None:
        """The *Retry* button."""
        self.set_state(flow_run, "SCHEDULED", "AwaitingRetry")

    def stop(self) -> None:
        """Press Ctrl-C; all its processes must end."""
        everyone = self.running.tree()
        self.running.process.send_signal(signal.SIGINT)
        assert self.running.wait() in (0, 130)
        assert "Traceback" not in self.running.output
        eventually(lambda: not alive(everyone), "the end of all processes")


def serve(start: Callable[..., Running], output: Path, ports: tuple[int, int]) -> Serving:
    """Start `infini serve` and wait until it is ready."""
    options = ("--port", str(ports[0]), "--mlflow-port", str(ports[1]))
    running = start("serve", "--output-dir", output, *options)
    running.wait_for("Ready: ")
    serving = Serving(running, output, f"http://{HOST}:{ports[0]}/api")
    # Otherwise a test that runs at three in the morning meets an engine that it has not started.
    api(serving.url, f"deployments/{serving.deployment('preprocess')}/pause_deployment")
    return serving


@contextmanager
def prefect_server(output: Path) -> Iterator[str]:
    """Run a Prefect server with its database in an output folder; yields the API's address."""
    config = load_config(overrides=[f"run.output_dir={output}"])
    service = start_prefect(config, free_port())
    eventually(lambda: answers(f"{service.url}/api/health"), "the Prefect server")
    try:
        yield f"{service.url}/api"
    finally:
        end_tree(service.process, 10.0)
