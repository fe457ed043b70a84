"""The processes of `infini serve`: Prefect's server, MLflow's server and the worker.

The servers bind to loopback and keep their records in the output folder. Each process dies with the
one that started it, and `Service.restart_if_exited` starts it again after each exit of its own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flows.serving.access import LOOPBACK_NAMES, server_environment
from infini_model.config import Config
from infini_model.runtime import pictures
from infini_model.runtime.errors import UserError
from infini_model.runtime.processes import bound, end_tree, wait_until
from infini_model.runtime.storage import is_locked, make_folder

HOST = "127.0.0.1"
WORK_POOL = "infini"
PROJECT = Path(__file__).resolve().parents[2]
START_SECONDS = 300.0
GRACE_SECONDS = 10.0
# Exits within this time after which a process is considered broken.
MOST_EXITS = 5
WITHIN_SECONDS = 300.0


@dataclass
class Service:
    """A process that is started at once, and again when it has exited and what it `needs` is up.

    `env` is added to the environment of this process; `health` is the path below `url` that answers
    once it is up. The worker has neither. `process` is the one that was started last.
    """

    name: str
    command: Sequence[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    health: str = ""
    needs: Callable[[], bool] = lambda: True
    process: subprocess.Popen[bytes] = field(init=False)
    _exits: list[float] = field(init=False, default_factory=list)
    _due: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        make_folder(self.log.parent)
        self._start()

    def _start(self) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                bound(self.command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **self.env, "PWD": str(PROJECT)},
                cwd=PROJECT,
            )

    def answers(self) -> bool:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(self.url + self.health, timeout=1.0).close()  # noqa: S310
            return True
        return False

    def wait_until_up(self) -> None:
        """Block until it answers. Raises `UserError` naming the log if it does not."""
        in_time = wait_until(
            lambda: self.process.poll() is not None or self.answers(),
            every_seconds=0.05,
            timeout_seconds=START_SECONDS,
        )
        if not in_time or self.process.poll() is not None:
            raise UserError(f"{self.name} did not start; see {self.log}")

    def restart_if_exited(self, say: Callable[[str], None], now: float) -> None:
        """Restart the process if it has exited, after a delay that doubles each time.

        `now` is the time in seconds. Raises `UserError` in one line when it exits too often.
        """
        status = self.process.poll()
        if status is None:
            return
        if self._due is None:
            self._exits = [then for then in self._exits if now - then <= WITHIN_SECONDS] + [now]
            if len(self._exits) >= MOST_EXITS:
                raise UserError(
                    f"{self.name} has exited {MOST_EXITS} times within "
                    f"{WITHIN_SECONDS / 60:g} minutes; see {self.log}"
                )
            delay = 2.0 ** (len(self._exits) - 1)
            self._due = now + delay
            say(f"{self.name} has exited ({status}); restarting it in {delay:g} s")
        if now >= self._due and self.needs():
            self._due = None
            self._start()

    def close(self) -> None:
        """End the process and everything it started, by SIGKILL after the grace period."""
        end_tree(self.process, GRACE_SECONDS)


def prefect_dir(config: Config) -> Path:
    """The folder of the server's records, one per machine that shares the output folder."""
    node = config.launch.node_rank
    name = f"prefect-node-{node}" if node else "prefect"
    return config.run.output_dir.resolve() / name


def api_lock(home: Path, port: int) -> Path:
    """Name the file that `infini api` holds locked, with its address and its model."""
    return home / f"api-{port}.lock"


def running_apis(home: Path) -> set[str]:
    """List each `infini api` of the output folder that is ready: its address and its model."""
    known = (file.read_text() for file in home.glob("api-*.lock") if is_locked(file))
    return set(filter(None, known))


def prefect_environment(config: Config) -> dict[str, str]:
    """Settings of a server with its records in the output folder, and of its clients.

    The lease store is on disk: leases in the server's memory would be lost on a restart, leaving
    concurrency slots occupied. No events of the past are sent to those who begin to listen: workers
    take a cancellation of the last 15 minutes for one of the retry that they have just started.
    """
    home = prefect_dir(config)
    database = config.database(f"{home.name}/prefect.db", "sqlite+aiosqlite")
    return {
        "PREFECT_HOME": str(home),
        pictures.FOLDER: str(home / "pictures"),
        "PREFECT_API_DATABASE_CONNECTION_URL": database,
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
            "prefect.server.concurrency.lease_storage.filesystem"
        ),
        "PREFECT_SERVER_EVENTS_MAXIMUM_WEBSOCKET_BACKFILL": "PT0S",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_LOGGING_FORMATTERS_STANDARD_FLOW_RUN_FMT": (
            "%(asctime)s | %(flow_name)s | %(message)s"
        ),
        "PREFECT_LOGGING_FORMATTERS_STANDARD_TASK_RUN_FMT": (
            "%(asctime)s | %(task_name)s | %(message)s"
        ),
    }


def own_server(url: str) -> dict[str, str]:
    """Settings for clients of the server at `url`, which serves both of Prefect's UIs.

    Links lead to the newer UI: the forms of the older one cannot save small numbers.
    """
    return {"PREFECT_API_URL": f"{url}/api", "PREFECT_UI_URL": f"{url}/v2"}


def free_port() -> int:
    """A free loopback port for a server that takes seconds to listen."""
    while True:
        # Below the ephemeral ports, one of which another process could be given meanwhile.
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port


def check_port(port: int, option: str) -> None:
    """Raise `UserError` naming `option` if `port` is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UserError(f"{option}: port {port} is in use; choose another") from error


def _uvicorn(factory: str, port: int) -> list[str]:
    app, where = f"flows.serving.guard:{factory}", ["--host", HOST, "--port", str(port)]
    return [sys.executable, "-m", "uvicorn", "--factory", app, *where]


def start_prefect(
    config: Config, port: int, secret: str | None = None, database: str | None = None
) -> Service:
    """Start Prefect's server and UI on loopback; they are up a few seconds later.

    `database` is the address of its database; None is a SQLite file in the output folder.
    """
    records = {} if database is None else {"PREFECT_API_DATABASE_CONNECTION_URL": database}
    return Service(
        "the Prefect server",
        _uvicorn("prefect_app", port),
        log=prefect_dir(config) / "server.log",
        env={
            **prefect_environment(config),
            **records,
            **server_environment(secret),
            # Relative to the page; the default names the default port.
            "PREFECT_SERVER_UI_API_URL": "/api",
            "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": ",".join(
                f"http://{name}:{port}" for name in LOOPBACK_NAMES
            ),
        },
        url=f"http://{HOST}:{port}",
        health="/api/health",
    )


def start_mlflow(config: Config, port: int, secret: str | None = None) -> Service:
    """Start MLflow's server and UI on loopback; they are up a few seconds later."""
    # Such as this one: then the records are those of the output folder.
    is_server = config.tracking_uri.startswith(("http", "databricks"))
    own = config.database("mlflow/mlflow.db")
    root = config.run.output_dir.resolve() / "mlflow"
    return Service(
        "the MLflow server",
        _uvicorn("mlflow_app", port),
        log=root / "server.log",
        env={
            **server_environment(secret),
            "MLFLOW_BACKEND_STORE_URI": own if is_server else config.tracking_uri,
            "MLFLOW_ARTIFACTS_DESTINATION": str(root / "artifacts"),
            "MLFLOW_EXPERIMENT_NAME": config.tracking.experiment_name,
        },
        url=f"http://{HOST}:{port}",
        health="/health",
    )


def start_worker(config: Config, prefect: Service) -> Service:
    """Start the worker of the work pool, whose restarts wait for Prefect's server."""
    return Service(
        "the worker",
        [sys.executable, "-m", "prefect", "worker", "start", "--pool", WORK_POOL],
        log=prefect_dir(config) / "worker.log",
        needs=prefect.answers,
    )
