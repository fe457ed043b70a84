"""A real S3 server, moto's, and a line to it that can be cut.

moto honours the conditions of requests, without which neither a changed object nor a lost race
would be noticed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from commands import PATIENCE, eventually
from ports import free_port

from infini_model.runtime.processes import bound

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIAUNTOLDIDENTITY",
    "AWS_SECRET_ACCESS_KEY": "unt0ld/s3cret+of/the+tests",
    "AWS_SESSION_TOKEN": "unt0ldsessiontoken",
}

# An answer lists so many objects; of a real store, 1000.
LISTED_AT_ONCE = 20
# Left alone, moto lets another write come between the check of a condition and the write.
MOTO = """
import threading
from moto.s3.responses import S3Response
from moto.server import main
one_at_a_time, put_object = threading.Lock(), S3Response.put_object
def put(self):
    with one_at_a_time:
        return put_object(self)
S3Response.put_object = put
main()
"""


class Line:
    """A TCP proxy in front of a server, which it reaches at `port` of this machine."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        # Bound but never listening: nobody else can take the port while the line is cut.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", free_port()))
        self.port = self._reserved.getsockname()[1]
        self._open: list[socket.socket] = []
        self._changing = threading.Lock()
        self._cut_after: int | None = None
        self.accepted = 0  # connections
        self._listener: socket.socket | None = None
        self._speaks = threading.Event()
        self._speaks.set()
        self.connect()

    def connect(self) -> None:
        if self._listener is not None:
            return
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._listen, args=(self._listener,), daemon=True).start()

    def disconnect(self) -> None:
        """Cut all connections and refuse others, as if the server had died."""
        if self._listener is not None:
            # Closing alone would leave the port to the thread that still accepts.
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        with self._changing:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            self._open = []

    @contextmanager
    def gone(self) -> Iterator[None]:
        """The server is gone while the block runs, or until `connect` is called in it."""
        self.disconnect()
        try:
            yield
        finally:
            self.connect()

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Connections stay open while the block runs, but no answer comes."""
        self._speaks.clear()
        try:
            yield
        finally:
            self._speaks.set()

    def cut_after(self, count: int) -> None:
        """Cut the connection on which the server has sent `count` bytes from now on, once."""
        self._cut_after = count

    def _listen(self, listener: socket.socket) -> None:
        while True:
            try:
                client = listener.accept()[0]
            except OSError:
                return
            with self._changing:
                # It may have been accepted just before all connections were cut.
                if self._listener is not listener:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._open += [client, server]
                self.accepted += 1
            for pump, ends in ((self._send, (client, server)), (self._answer, (server, client))):
                threading.Thread(target=pump, args=ends, daemon=True).start()

    def _send(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := client.recv(1 << 16):
                server.sendall(content)
        _end(client, server)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := server.recv(1 << 16):
                self._speaks.wait()
                with self._changing:
                    left = self._cut_after
                    cut = left is not None and len(content) >= left
                    if left is not None:
                        self._cut_after = None if cut else left - len(content)
                client.sendall(content[:left])
                if cut:
                    break
        _end(client, server)


def _end(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


class S3Server:
    """moto's server on its own port, and a line to it."""

    def __init__(self) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-c", MOTO, "-H", "127.0.0.1", "-p", str(port)]
        self._process = subprocess.Popen(
            bound(command),
            env=os.environ | {"MOTO_S3_DEFAULT_MAX_KEYS": str(LISTED_AT_ONCE)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        eventually(self._answers, "the S3 server")
        self.line = Line(port)

    def _answers(self) -> bool:
        assert self._process.poll() is None
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/moto-api/"):
            return True
        return False

    def _allow(self, requests: bytes) -> None:
        """Let so many requests pass before credentials are checked; it knows none."""
        url = f"{self.url}/moto-api/reset-auth"
        request = urllib.request.Request(url, requests, {"Content-Type": "text/plain"})
        urllib.request.urlopen(request, timeout=PATIENCE).close()

    def environment(self) -> dict[str, str]:
        """How a client reaches it, over the line."""
        return CREDENTIALS | {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.line.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
        }

    def make_bucket(self) -> str:
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self.client().create_bucket(Bucket=name)
        return name

    def client(self) -> Any:
        """Another client, Amazon's own, that reaches the server directly."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id="someone",
            aws_secret_access_key="else",
        )

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """All credentials are refused for the duration of the block."""
        self._allow(b"0")
        try:
            yield
        finally:
            self._allow(b"inf")

    def close(self) -> None:
        self.line.disconnect()
        self._process.kill()
        self._process.wait()
