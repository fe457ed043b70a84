"""The servers of `infini serve` as their clients, their supervisor and their database see them."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import asyncpg
import pytest
from commands import PATIENCE, Environment, api, run
from ports import free_port

from flows.serving import connection, database
from flows.serving.access import choose_secret
from flows.serving.connection import get
from flows.serving.database import check_database
from flows.serving.engine import ENGINES, engines_dir
from flows.serving.servers import (
    HOST,
    MOST_EXITS,
    WITHIN_SECONDS,
    Service,
    check_port,
    prefect_dir,
    start_prefect,
)
from infini_model.config import load_config
from infini_model.runtime.errors import UserError
from infini_model.runtime.storage import lock, write_json

PASSWORD = "pass-word"
BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
# PostgreSQL refuses to run as root.
ACCOUNT = "postgres" if os.geteuid() == 0 else None


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def test_a_port_in_use_is_named(listener: socket.socket) -> None:
    port = port_of(listener)
    with pytest.raises(UserError, match=f"^--mlflow-port: port {port} is in use; choose another$"):
        check_port(port, "--mlflow-port")


def test_who_hangs_up_is_asked_again(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "STALL_SECONDS", PATIENCE)
    monkeypatch.setattr(connection, "ANSWER_SECONDS", PATIENCE)

    def serve() -> None:
        for answer in (b"", b"HTTP/1.0 401 Unauthorized\r\n\r\n"):
            taken, _ = listener.accept()
            with taken:
                taken.recv(1000)
                taken.sendall(answer)

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    assert get(f"http://127.0.0.1:{port_of(listener)}/", None).status_code == 401
    serving.join()


def test_a_server_that_is_silent_is_given_up_and_one_that_is_down_is_asked_once(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PAUSE_SECONDS", -1.0)  # whoever paused would get a ValueError
    with pytest.raises(OSError, match="Connection refused"):
        get(f"http://127.0.0.1:{free_port()}/", None)
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.0)
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 0.1)
    with pytest.raises(OSError, match="timed out"):
        get(f"http://127.0.0.1:{port_of(listener)}/", None)


@pytest.mark.parametrize(
    ("configured", "address"),
    [
        (None, "http://127.0.0.1:4200/api"),
        ("http://localhost:4200/api/", "http://127.0.0.1:4200/api"),
        ("http://prefect.example/api", "http://prefect.example/api"),
    ],
)
def test_infini_serve_finds_any_command_that_was_killed_and_tells_only_its_clients_its_secret(
    configured: str | None, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {} if configured is None else {"PREFECT_API_URL": configured}
    monkeypatch.setattr(os, "environ", environment | {"PREFECT_HOME": str(tmp_path / "none")})
    config = load_config(overrides=[f"run.output_dir={tmp_path}"])
    home = prefect_dir(config)
    secret = choose_secret(home, auth=True)
    addresses = {"api_url": "http://127.0.0.1:4200/api", "mlflow_url": "http://127.0.0.1:5000"}
    write_json(home / "serve.json", addresses)
    with lock(home / "serve.lock"):
        assert connection.use_server(config) == os.environ["PREFECT_API_URL"] == address
    is_its_client = address.startswith("http://127.0.0.1")
    assert os.environ.get("PREFECT_API_AUTH_STRING") == (secret if is_its_client else None)
    assert os.environ[ENGINES] == str(engines_dir(home))


def test_a_prefect_profile_names_server_and_password(tmp_path: Path, alone: Environment) -> None:
    (tmp_path / "profiles.toml").write_text(
        'active = "mine"\n[profiles.mine]\nPREFECT_API_URL = "http://prefect.example/api"\n'
        'PREFECT_API_AUTH_STRING = "user:pass"\n'
    )
    shown = "configured(API_URL), configured(AUTH_STRING)"
    asked = f"from flows.serving.connection import *; print({shown})"
    done = run([sys.executable, "-c", asked], alone | {"PREFECT_HOME": str(tmp_path)})
    assert done.stdout == "http://prefect.example/api user:pass\n", done.stderr


class Processes:
    """Stands for `subprocess.Popen`: processes of which `die` ends the newest."""

    def __init__(self) -> None:
        self.started: list[Mock] = []

    def __call__(self, *_: Any, **__: Any) -> Mock:
        self.started.append(Mock(**{"poll.return_value": None}))
        return self.started[-1]

    def die(self) -> None:
        self.started[-1].poll.return_value = -9


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    processes = Processes()
    monkeypatch.setattr(subprocess, "Popen", processes)
    return processes


def test_a_service_restarts_after_its_delay_and_dependencies(
    processes: Processes, tmp_path: Path
) -> None:
    said, is_up = list[str](), True
    service = Service("the service", [], tmp_path / "its.log", needs=lambda: is_up)

    def starts(now: float) -> int:
        service.restart_if_exited(said.append, now)
        return len(processes.started)

    assert starts(0.0) == 1
    processes.die()
    assert starts(1.0) == 1
    assert said == ["the service has exited (-9); restarting it in 1 s"]
    assert starts(1.9) == 1
    is_up = False
    assert starts(2.1) == 1
    is_up = True
    assert starts(2.1) == 2
    assert service.process is processes.started[-1]
    assert len(said) == 1


def test_a_service_that_exits_too_often_is_an_error(processes: Processes, tmp_path: Path) -> None:
    said, now = list[str](), 0.0
    service = Service("the service", [], tmp_path / "its.log")

    def exit_after(seconds: float) -> None:
        nonlocal now
        now += seconds
        processes.die()
        service.restart_if_exited(said.append, now)
        now += float(said[-1].split()[-2])
        service.restart_if_exited(said.append, now)

    exit_after(0.0)
    # The first exit is forgotten by then, and the delays begin anew.
    exit_after(WITHIN_SECONDS)
    for _ in range(MOST_EXITS - 2):
        exit_after(0.0)
    error = f"^the service has exited 5 times within 5 minutes; see {tmp_path}/its.log$"
    with pytest.raises(UserError, match=error):
        exit_after(0.0)
    assert [line.rpartition(" in ")[2] for line in said] == ["1 s", "1 s", "2 s", "4 s", "8 s"]
    assert len(processes.started) == MOST_EXITS + 1


@pytest.fixture(scope="module")
def postgresql() -> Iterator[str]:
    """HOST:PORT of a dedicated PostgreSQL server with an empty database `records`."""
    # Not in pytest's folder, which no other account may enter.
    folder = Path(tempfile.mkdtemp())
    if ACCOUNT:
        shutil.chown(folder, ACCOUNT)

    def call(program: str, *arguments: str) -> None:
        command = [str(BINARIES[-1] / program), *arguments]
        env = {**os.environ, "PGPASSWORD": PASSWORD, "PGCTLTIMEOUT": f"{PATIENCE:.0f}"}
        done = subprocess.run(
            command, user=ACCOUNT, cwd=folder, env=env, stderr=subprocess.PIPE, check=False
        )
        assert done.returncode == 0, done.stderr

    secret = folder / "password"
    secret.write_text(PASSWORD)
    secret.chmod(0o644)
    data = str(folder / "data")
    port = free_port()
    call("initdb", "-D", data, "-U", "owner", "-A", "scram-sha-256", f"--pwfile={secret}", "-N")
    options = f"-p {port} -c listen_addresses={HOST} -k {folder} -F"
    call("pg_ctl", "-D", data, "-o", options, "-l", str(folder / "log"), "-w", "start")
    try:
        call("createdb", "-h", HOST, "-p", str(port), "-U", "owner", "records")
        yield f"{HOST}:{port}"
    finally:
        call("pg_ctl", "-D", data, "-m", "immediate", "stop")
        shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "CONNECT_SECONDS", PATIENCE)


@pytest.mark.story
def test_servers_that_start_together_make_one_database(tmp_path: Path) -> None:
    config = load_config(overrides=[f"run.output_dir={tmp_path}"])
    with (
        closing(start_prefect(config, free_port())) as one,
        closing(start_prefect(config, free_port())) as other,
    ):
        one.wait_until_up()
        other.wait_until_up()


@pytest.mark.story
def test_prefect_keeps_its_records_in_postgresql(postgresql: str, tmp_path: Path) -> None:
    address = f"owner:{PASSWORD}@{postgresql}/records"
    check_database(f"postgresql+asyncpg://{address}")
    config = load_config(overrides=[f"run.output_dir={tmp_path}"])
    service = start_prefect(config, free_port(), database=f"postgresql+asyncpg://{address}")
    with closing(service):
        service.wait_until_up()
        api(f"{service.url}/api", "flows/", name="kept")

    async def flows() -> list[str]:
        connection = await asyncpg.connect(f"postgresql://{address}")
        found = [row["name"] for row in await connection.fetch("SELECT name FROM flow")]
        await connection.close()
        return found

    assert asyncio.run(flows()) == ["kept"]
    assert not (tmp_path / "prefect" / "prefect.db").exists()
    assert PASSWORD not in service.log.read_text()


@pytest.mark.story
@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("owner:wrong-secret@{server}/records", 'authentication failed for user "owner"'),
        (f"owner:{PASSWORD}@{{server}}/missing", 'database "missing" does not exist'),
        (f"owner:{PASSWORD}@{HOST}:1/records", "Connect call failed"),
        (f"owner:{PASSWORD}@{{server}}/records?colour=red", "colour"),
    ],
)
def test_an_unusable_database_is_told_in_one_line(
    postgresql: str, address: str, reason: str
) -> None:
    with pytest.raises(UserError, match=r"^--database: [^\n]+$") as caught:
        check_database("postgresql+asyncpg://" + address.format(server=postgresql))
    assert reason in str(caught.value)
    assert "secret" not in str(caught.value)
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    ["secret", "postgresql://u:secret@h/x", "postgresql+asyncpg://u:secret@h:port/x", "mysql://x"],
)
def test_an_address_of_another_kind_is_told_what_is_expected(address: str) -> None:
    with pytest.raises(UserError, match=r"^--database: expected postgresql\+asyncpg://") as caught:
        check_database(address)
    assert "secret" not in str(caught.value)
