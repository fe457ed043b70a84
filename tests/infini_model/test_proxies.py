"""Where there is a proxy, requests to this machine do not go through it."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from commands import run

ASK = """
import infini_model, sys, urllib.request, httpx, requests
for url in sys.argv[1:]:
    print(urllib.request.urlopen(url).status, httpx.get(url).status_code,
          requests.get(url).status_code)
"""


class Yes(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Yes)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with closing(server.socket):
        yield server.server_port
        server.shutdown()


@pytest.mark.parametrize("direct", [{}, {"NO_PROXY": ".corp"}, {"no_proxy": "*"}])
def test_own_servers_are_reached_without_the_proxy(direct: dict[str, str], port: int) -> None:
    proxies = dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    urls = [f"http://{host}:{port}/" for host in ("127.0.0.1", "localhost")]
    done = run([sys.executable, "-c", ASK, *urls], {**os.environ, **proxies, **direct})
    assert done.stdout == 2 * "200 200 200\n", done.stderr
