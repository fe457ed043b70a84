"""Prefect's records in a real PostgreSQL, and errors of addresses that do not work."""

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import asyncpg
import pytest
from commands import PATIENCE, api
from ports import free_port

from flows.serving import database
from flows.serving.database import check_database
from flows.serving.services import HOST, start_prefect, wait_until_up
from infini_model.config import load_config
from infini_model.runtime.errors import UserError

PASSWORD = "pass-word"
BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
# PostgreSQL refuses to run as root.
ACCOUNT = "postgres" if os.geteuid() == 0 else None


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "CONNECT_SECONDS", PATIENCE)


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


@pytest.mark.story
def test_prefect_keeps_its_records_in_postgresql(postgresql: str, tmp_path: Path) -> None:
    address = f"owner:{PASSWORD}@{postgresql}/records"
    check_database(f"postgresql+asyncpg://{address}")
    config = load_config(overrides=[f"run.output_dir={tmp_path}"])
    service = start_prefect(config, free_port(), database=f"postgresql+asyncpg://{address}")
    with closing(service):
        wait_until_up(service, "/api/health")
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
def test_a_database_that_cannot_be_used_is_told_in_one_line(
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
