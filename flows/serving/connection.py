"""How a command finds Prefect's API and MLflow's page.

In this order: the API that the user configured, the one of a running `infini serve`, or a server
started for the command (Prefect's own ephemeral server loses task states).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from flows.serving.access import mlflow_client, prefect_client, stored_secret
from flows.serving.engine import ENGINES, engines_dir, serve_lock
from flows.serving.servers import (
    HOST,
    free_port,
    own_server,
    prefect_dir,
    prefect_environment,
    start_prefect,
)
from infini_model.config import Config
from infini_model.runtime.errors import UnreachableError, UserError
from infini_model.runtime.storage import is_locked, read_json_or_empty
from infini_model.training.mlflow_record import PAGE

if TYPE_CHECKING:
    import httpx

# A server that many commands share may stall: only one that has been silent, or has hung up, for so
# long is down.
STALL_SECONDS = 60.0
ANSWER_SECONDS = 10.0
PAUSE_SECONDS = 0.5
API_URL, AUTH_STRING = "PREFECT_API_URL", "PREFECT_API_AUTH_STRING"


def configured(variable: str) -> str | None:
    """A setting of Prefect in the user's environment or Prefect profile."""
    home = Path(os.environ.get("PREFECT_HOME", Path.home() / ".prefect"))
    value = os.environ.get(variable)
    if value or not (home / "profiles.toml").is_file():  # importing Prefect takes a second
        return value or None
    from prefect.settings import get_current_settings

    return get_current_settings().to_environment_variables().get(variable)


def served(config: Config) -> dict[str, str]:
    """The addresses of a running `infini serve` for the same output folder; empty without one.

    They are `api_url`, of Prefect's API, and `mlflow_url`.
    """
    home = prefect_dir(config)
    # While it is starting, there is no such file.
    return read_json_or_empty(home / "serve.json") if is_locked(serve_lock(home)) else {}


def get(url: str, auth_string: str | None) -> httpx.Response:
    """The answer to a GET with "user:password", repeated while the server stalls.

    Raises `UnreachableError`, at once if the connection is refused.
    """
    import httpx

    auth = None if auth_string is None else httpx.BasicAuth(*auth_string.split(":", 1))
    stalls = httpx.TimeoutException, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError
    deadline = time.monotonic() + STALL_SECONDS
    while True:
        try:
            return httpx.get(url, auth=auth, timeout=ANSWER_SECONDS, follow_redirects=True)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if not isinstance(error, stalls) or time.monotonic() > deadline:
                raise UnreachableError(str(error)) from error
        time.sleep(PAUSE_SECONDS)


def _check_answers(url: str) -> None:
    """Raise `UserError` if the configured API does not answer, or not as Prefect's does."""
    api = url.rstrip("/")
    try:
        status = get(f"{api}/health", None).status_code
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN) or "/workspaces/" in api:
            return  # Prefect Cloud requires authentication here.
        if status == HTTPStatus.OK:
            status = get(f"{api}/admin/version", configured(AUTH_STRING)).status_code
    except UnreachableError as error:
        raise UserError(
            f"PREFECT_API_URL: {url} does not answer ({error}); start it, or unset the variable"
        ) from error
    if status == HTTPStatus.UNAUTHORIZED:
        raise UserError(f"PREFECT_API_AUTH_STRING: {url} asks for another user:password")
    if status != HTTPStatus.OK:
        raise UserError(f"PREFECT_API_URL: {url} answers {status:d}; does it end in /api?")


def use_server(config: Config) -> str | None:
    """Make this process a client of the server that commands use, and of MLflow's.

    Returns the server's address; None if there is none yet, with the settings of one that is
    started with its records in the output folder. Call it before Prefect is imported, which reads
    the environment once.
    """
    home = prefect_dir(config)
    secret = stored_secret(home)
    os.environ.update(mlflow_client(secret, config.tracking_uri))
    own, addresses = configured(API_URL), served(config)
    url = addresses.get("api_url")
    # By the lock in it `infini serve` finds out that a command was killed, whatever its server is.
    os.environ[ENGINES] = str(engines_dir(home))
    if own is not None and own.rstrip("/").replace("localhost", HOST) != url:
        os.environ[API_URL] = own
        return own
    # As `infini serve` sets them for its own.
    os.environ.update(prefect_environment(config) | prefect_client(secret))
    if url is not None:
        os.environ.update(own_server(url.removesuffix("/api")) | {PAGE: addresses["mlflow_url"]})
    return url


@contextlib.contextmanager
def prefect_api(config: Config) -> Iterator[Callable[[], None]]:
    """Have PREFECT_API_URL name a running server while the block runs.

    Yields a function that blocks until the server answers, so that the caller can import Prefect
    while the server starts. Enter before Prefect is imported: it reads the environment once.
    """
    own = configured(API_URL)
    url = use_server(config)
    if own:
        _check_answers(own)
    if url:
        yield lambda: None
        return
    print("Starting a Prefect server for this command (infini serve keeps one up)", flush=True)
    service = start_prefect(config, free_port(), stored_secret(prefect_dir(config)))
    os.environ.update(own_server(service.url))
    with contextlib.closing(service):
        try:
            yield service.wait_until_up
        finally:
            from prefect.logging.handlers import APILogWorker

            # What is queued; at exit, without a server, Prefect would try for minutes to send it.
            APILogWorker.drain_all(timeout=5)
