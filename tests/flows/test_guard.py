"""Who may talk to the servers: requests as foreign pages, other users and programs send them."""

import base64
import http.client
import itertools
import json
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import PATIENCE, Environment, infini, succeed, tiny, write_settings
from ports import free_port
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import connect

from flows import doctor
from flows.serving.access import (
    choose_secret,
    mlflow_client,
    prefect_client,
    secret_file,
    stored_secret,
)
from flows.serving.servers import HOST, Service, prefect_environment, start_mlflow, start_prefect
from infini_model.config import load_config
from infini_model.runtime import pictures

SECRET = "infini:it-is-a-secret"
PATHS = {
    "prefect": "/api/admin/version",
    "mlflow": "/api/2.0/mlflow/experiments/get?experiment_id=0",
}
SIGNED_IN = {"Authorization": f"Basic {base64.b64encode(SECRET.encode()).decode()}"}
GUESS = {"Authorization": f"Basic {base64.b64encode(b'infini:guessed').decode()}"}
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


def ask(port: int, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    """Send exactly these headers."""
    connection = http.client.HTTPConnection(HOST, port, timeout=PATIENCE)
    with closing(connection):
        connection.request(method, path, None, headers)
        return connection.getresponse()


def at(port: int, pattern: str) -> str:
    """A name with the port of the server, or with that of a neighbour."""
    return pattern.format(port=port, other=port + 1)


def port_of(url: str) -> int:
    return int(url.split(":")[2].partition("/")[0])


@pytest.fixture(scope="module")
def closed(
    tmp_path_factory: pytest.TempPathFactory, with_tables: Callable[[Path], Path]
) -> Iterator[dict[str, Service]]:
    """Both servers, with the secret required."""
    output = with_tables(tmp_path_factory.mktemp("closed"))
    config = load_config(overrides=[f"run.output_dir={output}"])
    services = {
        "prefect": start_prefect(config, free_port(), SECRET),
        "mlflow": start_mlflow(config, free_port(), SECRET),
    }
    with closing(services["prefect"]), closing(services["mlflow"]):
        for service in services.values():
            service.wait_until_up()
        yield services


@pytest.mark.parametrize("name", ["open prefect", "prefect", "mlflow"])
def test_own_pages_are_answered_and_others_refused(
    name: str, server: str, closed: dict[str, Service]
) -> None:
    port, path, signed_in = port_of(server), PATHS["prefect"], dict[str, str]()
    if name in closed:
        port, path, signed_in = port_of(closed[name].url), PATHS[name], SIGNED_IN
    assert ask(port, path, **signed_in).status == 200
    for host in OWN:
        assert ask(port, path, Host=at(port, host), **signed_in).status == 200
        for page in OWN:
            origin = f"http://{at(port, page)}"
            answer = ask(port, path, Host=at(port, host), Origin=origin, **signed_in)
            assert answer.status == 200
            assert answer.headers["access-control-allow-origin"] == origin
            assert "frame-ancestors 'self'" in answer.headers["content-security-policy"]
    # A name that was pointed at this machine.
    for host in FOREIGN_HOSTS:
        page = at(port, host)
        for origin in ({}, {"Origin": f"http://{page}"}):
            assert ask(port, path, Host=page, **origin, **signed_in).status == 400, (host, origin)
    for origin in FOREIGN_ORIGINS:
        for method in ("GET", "POST", "OPTIONS"):
            # A browser sends this kind of body without asking the server first.
            asked = {"Access-Control-Request-Method": "POST", "Content-Type": "text/plain"}
            answer = ask(port, path, method, Origin=at(port, origin), **asked, **signed_in)
            assert answer.status == 403, (origin, method)
            assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("path", ["/api/events/out", "/api/logs/out", "/api/events/in"])
def test_websockets_are_for_own_pages_and_for_those_who_have_the_secret(
    server: str, closed: dict[str, Service], path: str
) -> None:
    def greet(port: int, token: str | None, **options: Any) -> str:
        url = f"ws://{HOST}:{port}{path}"
        patience: dict[str, Any] = {"open_timeout": PATIENCE, "ping_interval": None}
        with connect(url, subprotocols=["prefect"], **patience, **options) as opened:  # type: ignore[list-item]
            opened.send(json.dumps({"type": "auth", "token": token}))
            return str(json.loads(opened.recv())["type"])

    asking, everyone = port_of(closed["prefect"].url), port_of(server)
    for port, token in ((everyone, None), (asking, SECRET)):
        for origin in (None, f"http://localhost:{port}", f"http://127.0.0.1:{port}"):
            assert greet(port, token, origin=origin) == "auth_success"
        for page in FOREIGN_ORIGINS:
            with pytest.raises(InvalidStatus) as refused:
                greet(port, token, origin=at(port, page))
            assert refused.value.response.status_code == 403
    for token in (None, "infini:guessed"):
        with pytest.raises(ConnectionClosedError):
            greet(asking, token)


def test_who_has_no_secret_gets_401_on_all_but_health(closed: dict[str, Service]) -> None:
    prefect, mlflow = port_of(closed["prefect"].url), port_of(closed["mlflow"].url)
    of_prefect = ("/api/flows/filter", "/api/deployments/x/create_flow_run", "/api/admin/version")
    of_mlflow = (
        *("/", "/version", "/health/../version", "/get-artifact"),
        *("/ajax-api/2.0/mlflow/runs/search", "/ajax-api/3.0/mlflow/assistant/config"),
    )
    for port, paths in ((prefect, of_prefect), (mlflow, of_mlflow)):
        for path, method in itertools.product(paths, ("GET", "POST")):
            for headers in ({}, GUESS, {"Authorization": "Bearer x"}, {"Authorization": "Basic ü"}):
                assert ask(port, path, method, **headers).status == 401, path
    assert "Basic" in ask(mlflow, "/").headers["www-authenticate"]
    assert ask(prefect, "/api/health").status == ask(mlflow, "/health").status == 200
    assert ask(mlflow, "/", **SIGNED_IN).status == 200


def test_the_server_shows_published_pictures_and_no_other_file(
    closed: dict[str, Service], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To everyone who has the address: a page that shows an image can send no secret with it."""
    output, port = closed["prefect"].log.parent.parent, port_of(closed["prefect"].url)
    config, picture = load_config(overrides=[f"run.output_dir={output}"]), tmp_path / "loss.png"
    picture.write_bytes(b"a picture")
    monkeypatch.delenv(pictures.FOLDER, raising=False)
    assert pictures.publish(picture) is None
    monkeypatch.setenv(pictures.FOLDER, prefect_environment(config)[pictures.FOLDER])
    address = pictures.publish(picture)
    assert address is not None
    answer = ask(port, address)
    assert (answer.status, answer.headers["content-type"]) == (200, "image/png")
    for other in ("/", "/../prefect.db", "/%2e%2e/prefect.db", "/unknown.png"):
        assert ask(port, pictures.ADDRESS + other).status == 404


def test_no_command_line_has_the_secret_and_mlflow_is_one_process(
    closed: dict[str, Service],
) -> None:
    processes = {name: psutil.Process(each.process.pid) for name, each in closed.items()}
    for process in processes.values():
        assert "secret" not in " ".join(process.cmdline())
    # A child would outlive it when it is killed, and keep the port.
    assert processes["mlflow"].children(recursive=True) == []


def test_the_doctor_tells_which_secret_is_asked_for_and_commands_send_it(
    closed: dict[str, Service], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    page = closed["mlflow"].url
    config = load_config(overrides=[f"run.output_dir={tmp_path}", f"tracking.tracking_uri={page}"])
    monkeypatch.setenv("PREFECT_API_URL", f"{closed['prefect'].url}/api")
    monkeypatch.delenv("PREFECT_API_AUTH_STRING", raising=False)

    def remedies() -> list[str]:
        found = {finding.subject: finding.remedy for finding in doctor.examine(config)}
        return [found["Prefect API"], found["MLflow"]]

    variables = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
    assert remedies() == ["set PREFECT_API_AUTH_STRING", variables]
    for name, value in (prefect_client(SECRET) | mlflow_client(SECRET, page)).items():
        monkeypatch.setenv(name, value)
    assert remedies() == ["", ""]
    assert MlflowClient(page).search_experiments()
    # MLflow's client would send it to any server.
    assert mlflow_client(SECRET, "https://mlflow.example") == {}


def test_a_secret_is_told_once_and_remembered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert choose_secret(tmp_path, None) is None
    assert not capsys.readouterr().out
    secret = choose_secret(tmp_path, True)
    user, _, password = str(secret).partition(":")
    assert user == "infini"
    assert len(password) >= 32
    assert password in capsys.readouterr().out
    assert stat.S_IMODE(secret_file(tmp_path).stat().st_mode) == 0o600
    for auth in (None, True):
        assert choose_secret(tmp_path, auth) == stored_secret(tmp_path) == secret
        printed = capsys.readouterr().out
        assert password not in printed
        assert str(secret_file(tmp_path)) in printed
    assert choose_secret(tmp_path, False) == stored_secret(tmp_path) is None
    assert choose_secret(tmp_path, True) != secret


@pytest.mark.story
def test_a_command_of_a_folder_with_a_secret_reports_to_its_server_with_it(
    with_tables: Callable[[Path], Path], tmp_path: Path, text_files: Path, alone: Environment
) -> None:
    home = with_tables(tmp_path / "output") / "prefect"
    choose_secret(home, auth=True)
    settings = write_settings(tmp_path / "settings.yaml", tiny(text_files, tmp_path / "output"))
    done = succeed(infini("preprocess", "--config", settings), alone)
    assert "Unauthorized" not in done.stdout + done.stderr
    with closing(sqlite3.connect(home / "prefect.db")) as records:
        # Logs come by HTTP, events by a websocket.
        for table in ("log", "events"):
            assert records.execute(f"select count(*) from {table}").fetchone()[0] > 0
