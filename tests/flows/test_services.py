"""The servers of `infini serve` as their clients and their supervisor see them."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from commands import PATIENCE
from ports import free_port

from flows.serving import connection
from flows.serving.connection import status_of
from flows.serving.services import Service, check_port
from flows.serving.supervise import MOST_EXITS, WITHIN_SECONDS, Supervised
from infini_model.runtime.errors import UserError


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


def test_a_server_that_hangs_up_is_asked_again(
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
    assert status_of(f"http://127.0.0.1:{port_of(listener)}/", None) == 401
    serving.join()


def test_a_server_that_stays_silent_is_given_up(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.0)
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 0.1)
    with pytest.raises(OSError, match="timed out"):
        status_of(f"http://127.0.0.1:{port_of(listener)}/", None)


def test_a_server_that_is_down_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whoever paused to ask again would get a ValueError.
    monkeypatch.setattr(connection, "PAUSE_SECONDS", -1.0)
    with pytest.raises(OSError, match="Connection refused"):
        status_of(f"http://127.0.0.1:{free_port()}/", None)


class Services:
    """Starts services without a process, of which `die` ends the newest; is their clock, too."""

    def __init__(self) -> None:
        self.processes: list[Mock] = []
        self.now = 1000.0

    def __call__(self) -> Service:
        self.processes.append(Mock(**{"poll.return_value": None}))
        return Service("the service", self.processes[-1], url="", log=Path("its.log"))

    def die(self) -> None:
        self.processes[-1].poll.return_value = -9


def test_a_service_is_restarted_after_its_delay_once_its_dependencies_are_up() -> None:
    services, said, is_up = Services(), list[str](), True
    supervised = Supervised(services, lambda: is_up, clock=lambda: services.now)

    def starts() -> int:
        supervised.check(said.append)
        return len(services.processes)

    assert starts() == 1
    services.die()
    assert starts() == 1
    assert said == ["the service has exited (-9); restarting it in 1 s"]
    services.now += 0.9
    assert starts() == 1
    is_up = False
    services.now += 0.2
    assert starts() == 1
    is_up = True
    assert starts() == 2
    assert supervised.service.process is services.processes[-1]
    assert len(said) == 1


def test_a_service_that_exits_too_often_is_an_error_that_names_its_log() -> None:
    services, said = Services(), list[str]()
    supervised = Supervised(services, clock=lambda: services.now)

    def exit_after(seconds: float) -> None:
        services.now += seconds
        services.die()
        supervised.check(said.append)
        services.now += float(said[-1].split()[-2])
        supervised.check(said.append)

    exit_after(0.0)
    # The first exit is forgotten by then, and the delays begin anew.
    exit_after(WITHIN_SECONDS)
    for _ in range(MOST_EXITS - 2):
        exit_after(0.0)
    error = "^the service has exited 5 times within 5 minutes; see its.log$"
    with pytest.raises(UserError, match=error):
        exit_after(0.0)
    assert [line.rpartition(" in ")[2] for line in said] == ["1 s", "1 s", "2 s", "4 s", "8 s"]
    assert len(services.processes) == MOST_EXITS + 1


# A cursor that was not read to its end becomes garbage, its connection waits for the write lock
# that the main thread holds, and the main thread creates objects until a collection is due. Only if
# that does not block does it give the lock up before the other connection has given up waiting.
WAIT_FOR_THE_LOCK = """
import gc, sqlite3, sys, threading
from flows.serving.sqlite import collect_garbage_in_a_thread

collect_garbage_in_a_thread()
holder, waiter = (
    sqlite3.connect(
        sys.argv[1], isolation_level=None, timeout=float(sys.argv[2]), check_same_thread=False
    )
    for _ in range(2)
)
holder.execute("PRAGMA journal_mode = WAL")
cursor = waiter.execute("SELECT 1 UNION SELECT 2")
cursor.fetchone()
garbage = [cursor]
garbage.append(garbage)
holder.execute("BEGIN IMMEDIATE")
has_begun = threading.Event()
# Called once the statement holds its connection, which it does not release until it ends.
waiter.set_trace_callback(lambda statement: has_begun.set())

def wait():
    waiter.execute("BEGIN IMMEDIATE")
    print("got the lock")

waiting = threading.Thread(target=wait)
waiting.start()
has_begun.wait()
del cursor, garbage
kept = [[] for _ in range(200_000)]
holder.execute("COMMIT")
waiting.join()
"""


def test_collecting_garbage_does_not_block_a_server_whose_connections_wait_for_sqlite(
    tmp_path: Path,
) -> None:
    words = [sys.executable, "-c", WAIT_FOR_THE_LOCK, str(tmp_path / "a.db"), str(PATIENCE)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "got the lock\n", done.stderr
