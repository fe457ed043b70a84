"""Stores that a benchmark serves itself, each answering what one reader needs of S3."""

from __future__ import annotations

import http.server
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "someone",
    "AWS_SECRET_ACCESS_KEY": "else",
    "AWS_ALLOW_HTTP": "true",
    "AWS_REGION": "us-east-1",
}


class Store(http.server.BaseHTTPRequestHandler):
    """Answers requests; a subclass says how. Its attributes are given by `served`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def serve(handler: type[Store], attributes: dict[str, Any], tell: Connection) -> None:
    """Serve, in a process of its own."""
    for name, value in attributes.items():
        setattr(handler, name, value)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    tell.send(server.server_port)
    server.serve_forever()


@contextmanager
def served(handler: type[Store], **attributes: object) -> Iterator[None]:
    """This process, and those that it starts, reach the store while the block runs."""
    heard, tell = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=serve, args=(handler, attributes, tell), daemon=True)
    server.start()
    os.environ |= CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{heard.recv()}"}
    try:
        yield
    finally:
        server.terminate()
        server.join()
