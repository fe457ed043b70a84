"""The servers beside the flows: Prefect's API and UI, MLflow's page, and a worker.

`prefect_api` gives a command the server that the user configured, the one that `infini serve`
keeps up, or a real one of its own for as long as the command lasts (the ephemeral server of Prefect
loses task states). All servers bind to loopback, keep their records in the output folder, and die
with the process that started them.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from importlib import metadata
from pathlib import Path
from urllib.parse import quote

from flows.serving.access import EVERYONE, EXPERIMENT, LOOPBACK_NAMES, Access, stored_access
from flows.serving.engine import ENGINES
from infini_model.config import Config
from infini_model.runtime.errors import UserError
from infini_model.runtime.processes import bound, end_tree
from infini_model.runtime.storage import lock, make_folder
from infini_model.training.callbacks.mlflow_record import PAGE

HOST = "127.0.0.1"
START_SECONDS = 120.0
GRACE_SECONDS = 10.0
PROJECT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Service:
    """A server process and where it answers."""

    name: str
    process: subprocess.Popen[bytes]
    url: str
    log: Path


def prefect_dir(config: Config) -> Path:
    """Where the server keeps its records; machines that share the output folder share none."""
    node = config.launch.node_rank
    name = f"prefect-node-{node}" if node else "prefect"
    return config.run.output_dir.resolve() / name


def engines_dir(config: Config) -> Path:
    """Where each engine of a flow run has a locked file and its log."""
    return prefect_dir(config) / "engines"


def prefect_environment(config: Config) -> dict[str, str]:
    """Settings of a server that keeps its records in the output folder.

    The lease store is on disk: leases in the server's memory would be lost with it and leave
    concurrency slots taken.
    """
    home = prefect_dir(config)
    return {
        "PREFECT_HOME": str(home),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home / 'prefect.db'}",
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
            "prefect.server.concurrency.lease_storage.filesystem"
        ),
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_LOGGING_FORMATTERS_STANDARD_FLOW_RUN_FMT": (
            "%(asctime)s | %(flow_name)s | %(message)s"
        ),
        "PREFECT_LOGGING_FORMATTERS_STANDARD_TASK_RUN_FMT": (
            "%(asctime)s | %(task_name)s | %(message)s"
        ),
    }


def own_server(url: str) -> dict[str, str]:
    """Settings for those who use the server at `url`, which has both of Prefect's UIs.

    Links lead to the newer one: the forms of the older cannot save small numbers.
    """
    return {"PREFECT_API_URL": f"{url}/api", "PREFECT_UI_URL": f"{url}/v2"}


def free_port() -> int:
    """A port on loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def check_port(port: int, option: str) -> None:
    """Raise `UserError` naming `option` if something listens on `port` already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UserError(f"{option}: port {port} is in use; choose another") from error


def start(
    name: str, command: Sequence[str], *, log: Path, env: Mapping[str, str], url: str = ""
) -> Service:
    """Start a server process that dies with this one; its output is added to `log`."""
    make_folder(log.parent)
    with log.open("ab") as output:
        process = subprocess.Popen(
            bound(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **env, "PWD": str(PROJECT)},
            cwd=PROJECT,
        )
    return Service(name, process, url, log)


def answers(service: Service, path: str = "/api/health") -> bool:
    """Whether `service` answers at `path`."""
    with contextlib.suppress(urllib.error.URLError, OSError):
        urllib.request.urlopen(service.url + path, timeout=1.0).close()  # noqa: S310 - loopback
        return True
    return False


def wait_until_up(service: Service, path: str) -> None:
    """Return once `service` answers at `path`. Raises `UserError` that names its log if not."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and service.process.poll() is None:
        if answers(service, path):
            return
        time.sleep(0.05)
    raise UserError(f"{service.name} did not start; see {service.log}")


@contextlib.contextmanager
def ending(services: list[Service]) -> Iterator[None]:
    """End the services in the reverse order of their start, however the block ends."""
    try:
        yield
    finally:
        for service in reversed(services):
            service.process.terminate()
        for service in reversed(services):
            end_tree(service.process, GRACE_SECONDS)


def _uvicorn(factory: str, port: int) -> list[str]:
    command = [sys.executable, "-m", "uvicorn", "--factory", f"flows.serving.guard:{factory}"]
    return [*command, "--host", HOST, "--port", str(port)]


def start_prefect(
    config: Config, port: int, access: Access = EVERYONE, database: str | None = None
) -> Service:
    """Start Prefect's server and UI on loopback; it answers a few seconds later.

    `database` is the address of its records; None is a SQLite file in the output folder.
    """
    records = {} if database is None else {"PREFECT_API_DATABASE_CONNECTION_URL": database}
    return start(
        "the Prefect server",
        _uvicorn("prefect_app", port),
        log=prefect_dir(config) / "server.log",
        env={
            **prefect_environment(config),
            **records,
            **access.servers(),
            # Where the page came from: it would ask on the default port otherwise.
            "PREFECT_SERVER_UI_API_URL": "/api",
            "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": ",".join(
                f"http://{name}:{port}" for name in LOOPBACK_NAMES
            ),
        },
        url=f"http://{HOST}:{port}",
    )


def _has_profile() -> bool:
    """Whether Prefect may know more than the environment; asking it costs a second."""
    home = Path(os.environ.get("PREFECT_HOME", Path.home() / ".prefect"))
    return (home / "profiles.toml").is_file()


def configured_url() -> str | None:
    """The API that the user's environment or Prefect profile names."""
    url = os.environ.get("PREFECT_API_URL")
    if url or not _has_profile():
        return url or None
    from prefect.settings import get_current_settings

    return get_current_settings().api.url


def configured_auth() -> str | None:
    """The "user:password" for that API in the user's environment or Prefect profile."""
    auth_string = os.environ.get("PREFECT_API_AUTH_STRING")
    if auth_string or not _has_profile():
        return auth_string or None
    from prefect.settings import get_current_settings

    secret = get_current_settings().api.auth_string
    return None if secret is None else secret.get_secret_value()


def _served(config: Config) -> dict[str, str]:
    """The addresses of an `infini serve` that is up for the same output folder, if there is one."""
    home = prefect_dir(config)
    if not (home / "serve.json").is_file():
        return {}
    with lock(home / "serve.lock", wait=False) as free:
        if free:
            return {}
    return dict(json.loads((home / "serve.json").read_text(encoding="utf-8")))


def served_url(config: Config) -> str | None:
    """The API of an `infini serve` that is up for the same output folder."""
    return _served(config).get("api_url")


def served_mlflow(config: Config) -> str | None:
    """The MLflow page of an `infini serve` that is up for the same output folder."""
    return _served(config).get("mlflow_url")


def _request(url: str, auth_string: str | None) -> urllib.request.Request:
    """A GET of `url` with "user:password"."""
    request = urllib.request.Request(url)  # noqa: S310 - the user's own address
    if auth_string is not None:
        encoded = base64.b64encode(auth_string.encode()).decode()
        request.add_header("Authorization", f"Basic {encoded}")
    return request


def status_of(url: str, auth_string: str | None) -> int:
    """The HTTP status at `url`, asked with "user:password". Raises `OSError` or `ValueError`."""
    try:
        with urllib.request.urlopen(_request(url, auth_string), timeout=10.0) as answer:  # noqa: S310
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def _check_answers(url: str) -> None:
    """Raise `UserError` if the API that the user configured does not answer, or answers 401."""
    api = url.rstrip("/")
    try:
        if status_of(f"{api}/health", None) != HTTPStatus.OK:
            return  # Prefect Cloud wants to know who asks.
        status = status_of(f"{api}/admin/version", configured_auth())
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise UserError(
            f"PREFECT_API_URL: {url} does not answer ({reason}); start it, or unset the variable"
        ) from error
    if status == HTTPStatus.UNAUTHORIZED:
        raise UserError(f"PREFECT_API_AUTH_STRING: {url} asks for another user:password")


@contextlib.contextmanager
def prefect_api(config: Config) -> Iterator[Callable[[], None]]:
    """Have PREFECT_API_URL name a real server while the block runs.

    Yields a function that returns once the server answers: what the block imports before it calls
    that costs nothing. Enter before Prefect is imported, which reads the environment once.
    """
    access = stored_access(prefect_dir(config))
    os.environ.update(access.mlflow_client(config.tracking_uri))
    configured, served = configured_url(), served_url(config)
    if configured is None:
        os.environ.update(prefect_environment(config))
        os.environ[ENGINES] = str(engines_dir(config))
        if page := served_mlflow(config):
            os.environ[PAGE] = page
    if configured in (None, served):
        os.environ.update(access.prefect_client())
    if configured:
        _check_answers(configured)
    if url := configured or served:
        os.environ["PREFECT_API_URL"] = url
        if url == served:
            os.environ.update(own_server(url.removesuffix("/api")))
        yield lambda: None
        return
    print("Starting a Prefect server for this command (infini serve keeps one up)", flush=True)
    service = start_prefect(config, free_port(), access)
    os.environ.update(own_server(service.url))
    with ending([service]):
        try:
            yield lambda: wait_until_up(service, "/api/health")
        finally:
            _send_logs()


def _send_logs() -> None:
    """Send what is queued while the API is there; at exit Prefect would wait for it for minutes."""
    from prefect.logging.handlers import APILogHandler

    for logger in ("prefect.flow_runs", "prefect.task_runs"):
        for handler in logging.getLogger(logger).handlers:
            if isinstance(handler, APILogHandler):
                handler.flush()


def start_mlflow(config: Config, port: int, access: Access = EVERYONE) -> Service:
    """Start MLflow's server and page on loopback; it answers a few seconds later."""
    root = make_folder(config.run.output_dir.resolve() / "mlflow")
    logging_file = metadata.distribution("mlflow").locate_file(
        "mlflow/server/uvicorn_log_config.yaml"
    )
    return start(
        "the MLflow server",
        [*_uvicorn("mlflow_app", port), "--log-config", str(logging_file)],
        log=root / "server.log",
        env={
            **access.servers(),
            "MLFLOW_BACKEND_STORE_URI": config.tracking_uri,
            "MLFLOW_ARTIFACTS_DESTINATION": str(root / "artifacts"),
            EXPERIMENT: config.tracking.experiment_name,
        },
        url=f"http://{HOST}:{port}",
    )


def experiment_page(mlflow: Service, config: Config, access: Access) -> str:
    """The address of the experiment's page; of the server where it does not tell."""
    name = quote(config.tracking.experiment_name)
    url = f"{mlflow.url}/api/2.0/mlflow/experiments/get-by-name?experiment_name={name}"
    try:
        with urllib.request.urlopen(_request(url, access.auth_string), timeout=10.0) as answer:  # noqa: S310
            number = json.load(answer)["experiment"]["experiment_id"]
    except (OSError, ValueError, KeyError):
        return mlflow.url
    # Without the workflow it opens on pages for traces of language models, which stay empty.
    return f"{mlflow.url}/#/experiments/{number}/runs?workflowType=machine_learning"
