"""Requests as foreign pages, other users and other programs send them, to real servers."""

import base64
import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
from commands import PATIENCE, eventually, is_gone, kill
from ports import free_port
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from flows import doctor
from flows.serving.access import Access
from flows.serving.services import (
    HOST,
    Service,
    start_mlflow,
    start_prefect,
    wait_until_up,
)
from infini_model.config import Config, load_config

SECRET = "infini:it-is-a-secret"
PATHS = {
    "prefect": "/api/admin/version",
    "mlflow": "/api/2.0/mlflow/experiments/get?experiment_id=0",
}
JSON = {"Content-Type": "application/json"}
SIGNED_IN = {"Authorization": f"Basic {base64.b64encode(SECRET.encode()).decode()}"}
FOREIGN_HOSTS = ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example:{port}", ""]
FOREIGN_ORIGINS = [
    "http://evil.example",
    "http://evil.example:{port}",
    "http://127.0.0.1:{other}",
    "http://localhost:{other}",
    "https://127.0.0.1:{port}",
    "null",
]
OWN = ["127.0.0.1:{port}", "localhost:{port}"]
# Whatever makes a browser send a body without asking first, and what it asks first for.
KINDS = ["text/plain", "application/x-www-form-urlencoded", "application/json"]


@dataclass(frozen=True)
class Answer:
    """What a server answered."""

    status: int
    headers: dict[str, str]
    body: bytes


def ask(
    port: int, path: str, method: str = "GET", body: str | None = None, **headers: str
) -> Answer:
    """Send exactly these headers (`content_type` is Content-Type)."""
    connection = http.client.HTTPConnection(HOST, port, timeout=PATIENCE)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, named)
    answer = connection.getresponse()
    try:
        return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def at(port: int, pattern: str) -> str:
    """A name with the port of the server, or with that of a neighbour."""
    return pattern.format(port=port, other=port + 1)


@pytest.fixture(scope="module")
def closed(
    tmp_path_factory: pytest.TempPathFactory, with_tables: Callable[[Path], Path]
) -> Iterator[dict[str, Service]]:
    """Both servers, with the secret required."""
    output = with_tables(tmp_path_factory.mktemp("closed"))
    config = load_config(overrides=[f"run.output_dir={output}"])
    access = Access(SECRET)
    services = {
        "prefect": start_prefect(config, free_port(), access),
        "mlflow": start_mlflow(config, free_port(), access),
    }
    with closing(services["prefect"]), closing(services["mlflow"]):
        for name, service in services.items():
            wait_until_up(service, "/api/health" if name == "prefect" else "/health")
        yield services


@pytest.fixture(params=["open prefect", "prefect", "mlflow"])
def guarded(
    request: pytest.FixtureRequest, server: str, closed: dict[str, Service]
) -> tuple[int, str, dict[str, str]]:
    """Port, a path and what signs in, of each server."""
    if request.param == "open prefect":
        return port_of(server), PATHS["prefect"], {}
    return port_of(closed[request.param].url), PATHS[request.param], SIGNED_IN


def port_of(url: str) -> int:
    """The port in an address."""
    return int(url.split(":")[2].partition("/")[0])


def test_own_pages_and_programs_are_answered(guarded: tuple[int, str, dict[str, str]]) -> None:
    port, path, signed_in = guarded
    assert ask(port, path, **signed_in).status == 200
    for host in OWN:
        assert ask(port, path, Host=at(port, host), **signed_in).status == 200
        for page in OWN:
            origin = f"http://{at(port, page)}"
            answer = ask(port, path, Host=at(port, host), Origin=origin, **signed_in)
            assert answer.status == 200
            assert answer.headers["access-control-allow-origin"] == origin
            assert "frame-ancestors 'self'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_a_name_that_was_pointed_at_loopback_is_refused(
    guarded: tuple[int, str, dict[str, str]], host: str
) -> None:
    port, path, signed_in = guarded
    page = at(port, host)
    assert ask(port, path, Host=page, **signed_in).status == 400
    assert ask(port, path, Host=page, Origin=f"http://{page}", **signed_in).status == 400


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
@pytest.mark.parametrize("origin", FOREIGN_ORIGINS)
def test_a_page_of_another_origin_is_refused(
    guarded: tuple[int, str, dict[str, str]], origin: str, method: str
) -> None:
    port, path, signed_in = guarded
    asked = {"Access-Control-Request-Method": "POST"} if method == "OPTIONS" else {}
    answer = ask(port, path, method, Origin=at(port, origin), **asked, **signed_in)
    assert answer.status == 403
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_foreign_page_posts_has_no_effect(
    server: str, closed: dict[str, Service], kind: str
) -> None:
    prefect, mlflow = port_of(server), port_of(closed["mlflow"].url)
    foreign = at(prefect, "http://127.0.0.1:{other}")
    evil = {"name": str(uuid4())}

    def flows() -> list[str]:
        answer = ask(prefect, "/api/flows/filter", "POST", "{}", **JSON)
        return [flow["name"] for flow in json.loads(answer.body)]

    def experiment() -> int:
        path = f"/api/2.0/mlflow/experiments/get-by-name?experiment_name={evil['name']}"
        return ask(mlflow, path, **SIGNED_IN).status

    def post(**headers: str) -> list[int]:
        path = "/api/2.0/mlflow/experiments/create"
        return [
            ask(prefect, "/api/flows/", "POST", json.dumps(evil), **headers).status,
            ask(mlflow, path, "POST", json.dumps(evil), **headers, **SIGNED_IN).status,
        ]

    assert post(Content_Type=kind, Origin=foreign) == [403, 403]
    assert evil["name"] not in flows()
    assert experiment() == 404
    # The same without the foreign page takes effect.
    assert post(**JSON) == [201, 200]
    assert evil["name"] in flows()
    assert experiment() == 200


@pytest.mark.parametrize("path", ["/api/events/out", "/api/logs/out", "/api/events/in"])
def test_websockets_are_for_own_pages_and_for_those_who_have_the_secret(
    server: str, closed: dict[str, Service], path: str
) -> None:
    def greet(port: int, token: str | None, **options: Any) -> str:
        url = f"ws://{HOST}:{port}{path}"
        patience: dict[str, Any] = {"open_timeout": PATIENCE, "ping_interval": None}
        with connect(url, subprotocols=["prefect"], **patience, **options) as opened:  # type: ignore[list-item]
            opened.send(json.dumps({"type": "auth", "token": token}))
            with ExitStack() as closing:
                closing.callback(opened.close)
                try:
                    return str(json.loads(opened.recv())["type"])
                except Exception as error:  # noqa: BLE001 - the server closed it
                    return type(error).__name__

    asking, everyone = port_of(closed["prefect"].url), port_of(server)
    for port, token in ((everyone, None), (asking, SECRET)):
        for origin in (None, f"http://localhost:{port}", f"http://127.0.0.1:{port}"):
            assert greet(port, token, origin=origin) == "auth_success"
        for page in FOREIGN_ORIGINS:
            with pytest.raises(InvalidStatus) as refused:
                greet(port, token, origin=at(port, page))
            assert refused.value.response.status_code == 403
    for token in (None, "infini:guessed"):
        assert greet(asking, token) == "ConnectionClosedError"


def test_who_has_no_secret_gets_401_on_all_but_health(closed: dict[str, Service]) -> None:
    guess = {"Authorization": "Basic " + base64.b64encode(b"infini:guessed").decode()}
    prefect, mlflow = port_of(closed["prefect"].url), port_of(closed["mlflow"].url)
    asked = [
        (prefect, "/api/flows/filter", "POST"),
        (prefect, "/api/deployments/x/create_flow_run", "POST"),
        (prefect, "/api/admin/version", "GET"),
        (mlflow, "/", "GET"),
        (mlflow, "/version", "GET"),
        (mlflow, "/health/../version", "GET"),
        (mlflow, "/get-artifact", "GET"),
        (mlflow, "/ajax-api/2.0/mlflow/runs/search", "POST"),
        (mlflow, "/ajax-api/3.0/mlflow/assistant/config", "GET"),
    ]
    for port, path, method in asked:
        for headers in ({}, guess, {"Authorization": "Bearer x"}, {"Authorization": "Basic ü"}):
            assert ask(port, path, method, **headers).status == 401, path
    assert "Basic" in ask(mlflow, "/").headers["www-authenticate"]
    assert ask(prefect, "/api/health").status == ask(mlflow, "/health").status == 200
    assert ask(mlflow, "/", **SIGNED_IN).status == 200


def test_the_secret_is_in_no_command_line(closed: dict[str, Service]) -> None:
    for service in closed.values():
        assert "secret" not in " ".join(psutil.Process(service.process.pid).cmdline())


def test_mlflow_takes_what_its_client_sends(
    closed: dict[str, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    page = closed["mlflow"].url
    with pytest.raises(MlflowException, match="401"):
        MlflowClient(page).search_experiments()
    for name, value in Access(SECRET).mlflow_client(page).items():
        monkeypatch.setenv(name, value)
    assert MlflowClient(page).search_experiments()
    assert Access(SECRET).mlflow_client("https://mlflow.example") == {}


def test_the_doctor_tells_when_a_server_asks_for_a_secret(
    closed: dict[str, Service], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = closed["mlflow"].url
    config = load_config(overrides=[f"run.output_dir={tmp_path}", f"tracking.tracking_uri={page}"])
    monkeypatch.setenv("PREFECT_API_URL", f"{closed['prefect'].url}/api")
    monkeypatch.delenv("PREFECT_API_AUTH_STRING", raising=False)

    def remedies(config: Config) -> list[str]:
        found = {finding.subject: finding for finding in doctor.examine(config)}
        return [found["Prefect API"].remedy, found["MLflow"].remedy]

    variables = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
    assert remedies(config) == ["set PREFECT_API_AUTH_STRING", variables]
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", SECRET)
    for name, value in Access(SECRET).mlflow_client(page).items():
        monkeypatch.setenv(name, value)
    assert remedies(config) == ["", ""]


STARTER = """
import signal, sys
from flows.serving.services import start_mlflow, wait_until_up
from infini_model.config import load_config

config = load_config(overrides=[f"run.output_dir={sys.argv[1]}"])
service = start_mlflow(config, int(sys.argv[2]))
wait_until_up(service, "/health")
print(service.process.pid, flush=True)
signal.pause()
"""


@pytest.mark.story
def test_mlflow_is_one_process_that_gives_its_port_back_when_its_parent_is_killed(
    tmp_path: Path,
) -> None:
    port = free_port()
    command = [sys.executable, "-c", STARTER, str(tmp_path), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        mlflow = psutil.Process(int(parent.stdout.readline()))
        assert mlflow.children(recursive=True) == []
        kill(psutil.Process(parent.pid), signal.SIGKILL)

    def is_free() -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                return False
        return True

    eventually(is_free, "the port is free")
    # A process that is ending closes its sockets first.
    eventually(lambda: is_gone(mlflow.pid), "the process is gone")
