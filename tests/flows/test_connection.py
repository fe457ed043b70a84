"""A server that stalls is asked again; one that is down is named."""

import socket
import threading
from collections.abc import Iterator

import pytest
from commands import PATIENCE
from ports import free_port

from flows.serving import connection
from flows.serving.connection import status_of

ANSWER = b"HTTP/1.0 401 Unauthorized\r\n\r\n"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def address(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}/"


def test_a_server_that_hangs_up_is_asked_again(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "STALL_SECONDS", PATIENCE)
    monkeypatch.setattr(connection, "ANSWER_SECONDS", PATIENCE)

    def serve() -> None:
        for answer in (b"", ANSWER):
            taken, _ = listener.accept()
            with taken:
                taken.recv(1000)
                taken.sendall(answer)

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    assert status_of(address(listener), None) == 401
    serving.join()


def test_a_server_that_stays_silent_is_given_up(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.0)
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 0.1)
    with pytest.raises(OSError, match="timed out"):
        status_of(address(listener), None)


def test_a_server_that_is_down_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whoever paused to ask again would get a ValueError.
    monkeypatch.setattr(connection, "PAUSE_SECONDS", -1.0)
    with pytest.raises(OSError, match="Connection refused"):
        status_of(f"http://127.0.0.1:{free_port()}/", None)
