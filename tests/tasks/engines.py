"""Flow runs as a worker starts them: with Prefect's engine in its own process."""

from __future__ import annotations

import contextlib
import sys
import urllib.error
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands import Environment, Running, api, eventually

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class FlowRun:
    """A flow run on a server, with the file and name of its flow."""

    server: str
    entrypoint: str
    number: str

    def start(self, env: Environment, log: Path) -> Running:
        """Start the engine of the run, as the first attempt or as another one."""
        names = {"PREFECT__FLOW_RUN_ID": self.number, "PREFECT__FLOW_ENTRYPOINT": self.entrypoint}
        return Running([sys.executable, "-m", "prefect.engine"], log, {**env, **names})

    def retry(self) -> None:
        """What the Retry button of the UI does."""
        self.set_state("SCHEDULED", "AwaitingRetry")

    def set_state(self, kind: str, name: str) -> None:
        """Set the state of the run from outside."""
        path = f"flow_runs/{self.number}/set_state"
        api(self.server, path, state={"type": kind, "name": name}, force=True)

    def read(self) -> dict[str, Any]:
        """The run as the server knows it."""
        return dict(api(self.server, f"flow_runs/{self.number}", "GET"))

    def tasks(self) -> dict[str, str]:
        """The states of the newest attempt's tasks, by the first word of their names."""
        found = api(self.server, "task_runs/filter", **self._mine, sort="EXPECTED_START_TIME_ASC")
        return {run["name"].split()[0]: run["state_name"] for run in found}

    def artifacts(self) -> list[dict[str, Any]]:
        """All artifacts of the run, but for those without a key, which Prefect makes of results."""
        wanted = {"flow_run_id": {"any_": [self.number]}}
        found = api(self.server, "artifacts/filter", artifacts=wanted)
        return [artifact for artifact in found if artifact["key"]]

    def logs(self) -> list[str]:
        """The lines of the run's log, in order."""
        wanted = {"flow_run_id": {"any_": [self.number]}}
        lines: list[str] = []
        # The server returns 200 lines at most.
        while len(lines) % 200 == 0:
            order = {"sort": "TIMESTAMP_ASC", "offset": len(lines)}
            page = api(self.server, "logs/filter", logs=wanted, **order)
            if not page:
                break
            lines += [line["message"] for line in page]
        return lines

    @property
    def _mine(self) -> dict[str, Any]:
        return {"flow_runs": {"id": {"any_": [self.number]}}}


def create(server: str, entrypoint: str, **parameters: Any) -> FlowRun:
    """Create a flow run of the flow at `entrypoint`, FILE:NAME below the repository."""
    created: list[str] = []

    def is_created() -> bool:
        # A server whose database is still busy with its own start answers 503.
        with contextlib.suppress(urllib.error.HTTPError):
            flow = api(server, "flows/", name=entrypoint.rpartition(":")[2])
            run = api(server, "flow_runs/", flow_id=flow["id"], parameters=parameters)
            created.append(run["id"])
        return bool(created)

    eventually(is_created, "the flow run")
    return FlowRun(server, str(ROOT / entrypoint), created[0])
