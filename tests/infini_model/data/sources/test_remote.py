"""Remote files are downloaded once and resumed; errors are one line."""

import functools
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from corpora import files_config

from infini_model.data.sources.download import download
from infini_model.runtime.errors import DataError, UnreachableError

CONTENT = b"".join(b'{"text": "document %d"}\n' % number for number in range(200_000))


class Server(BaseHTTPRequestHandler):
    """Serves CONTENT under every path that ends in .jsonl, as `state` says."""

    protocol_version = "HTTP/1.1"

    def __init__(self, state, *arguments):
        self.state = state
        super().__init__(*arguments)

    def do_HEAD(self):
        self.serve(body=False)

    def do_GET(self):
        self.serve(body=True)

    def serve(self, body):
        requested = self.headers.get("Range")
        self.state["requests"].append((self.command, requested))
        if "gone" in self.path or "forbidden" in self.path or "broken" in self.path:
            status = {"g": 404, "f": 403, "b": 503}[self.path[1]]
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        start = 0
        if requested and self.state["ranges"]:
            start = int(requested.removeprefix("bytes=").rstrip("-"))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.send_header("ETag", self.state["etag"])
        self.end_headers()
        if not body:
            return
        cut = self.state.pop("cut", None)
        self.wfile.write(CONTENT[start : cut or len(CONTENT)])
        if cut:
            self.close_connection = True

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    state = {"requests": [], "ranges": True, "etag": '"one"'}
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, state)) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        state["url"] = f"http://127.0.0.1:{running.server_port}"
        yield state
        running.shutdown()
        thread.join()


def gets(state):
    return [requested for method, requested in state["requests"] if method == "GET"]


def fetch(state, output_dir, path="/corpus.jsonl", progress=None):
    (part,) = download(files_config(state["url"] + path), output_dir, progress=progress).ranges
    return Path(part.file.address)


def test_a_file_is_downloaded_once(server, tmp_path):
    reports = []
    path = fetch(server, tmp_path, progress=lambda *seen: reports.append(seen))
    assert path.read_bytes() == CONTENT
    assert reports[-1] == (len(CONTENT), len(CONTENT))
    assert fetch(server, tmp_path) == path
    assert gets(server) == [None]
    server["etag"] = '"two"'
    assert fetch(server, tmp_path).read_bytes() == CONTENT
    assert gets(server) == [None, None]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_is_resumed_if_the_server_can(server, tmp_path, ranges):
    server |= {"cut": 3_000_000, "ranges": ranges}
    with pytest.raises(UnreachableError, match=r"corpus\.jsonl: (can|down)") as caught:
        fetch(server, tmp_path)
    assert server["url"] in str(caught.value)
    assert "\n" not in str(caught.value)
    (partial,) = (tmp_path / "raw").rglob("*.partial")
    there = partial.stat().st_size
    assert 0 < there <= 3_000_000
    assert fetch(server, tmp_path).read_bytes() == CONTENT
    assert gets(server) == [None, f"bytes={there}-"]
    assert not list((tmp_path / "raw").rglob("*.partial"))


def test_a_complete_partial_file_is_only_renamed(server, tmp_path):
    path = fetch(server, tmp_path)
    path.rename(path.with_name(path.name + ".partial"))
    assert fetch(server, tmp_path) == path
    assert gets(server) == [None]


def test_a_refusal_is_final(server, tmp_path):
    for path, complaint in (("/gone.jsonl", "not found"), ("/forbidden.jsonl", "Forbidden")):
        with pytest.raises(DataError, match=complaint) as caught:
            fetch(server, tmp_path, path)
        assert server["url"] + path in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(UnreachableError, match=r"broken\.jsonl: cannot be reached: 503"):
        fetch(server, tmp_path, "/broken.jsonl")
    with pytest.raises(DataError, match=r"corpus\.zip: unknown file format; takes \.txt"):
        fetch(server, tmp_path, "/corpus.zip")


def test_a_dead_host_is_a_connection_error_that_names_it(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        # Bound but not listening: nobody else can take the port.
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/corpus.jsonl"
        with pytest.raises(ConnectionError, match=url) as caught:
            download(files_config(url), tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConnectionError, match=r"no-such-host\.invalid"):
        download(files_config("http://no-such-host.invalid/a.txt"), tmp_path)


def test_an_unknown_protocol_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"nonsense://a/b\.txt: cannot be read"):
        download(files_config("nonsense://a/b.txt"), tmp_path)


def test_other_file_systems_are_copied_and_globbed(tmp_path):
    (tmp_path / "a.txt").write_text("eins")
    (tmp_path / "b.txt").write_text("zwei")

    def fetched():
        listing = download(files_config(f"file://{tmp_path}/*.txt"), tmp_path / "out")
        return sorted((Path(part.file.address) for part in listing.ranges), key=lambda p: p.name)

    first, second = fetched()
    assert (first.read_text(), second.read_text()) == ("eins", "zwei")
    assert first.is_relative_to(tmp_path / "out" / "raw")
    first.unlink()
    first.with_name("a.txt.partial").write_text("ei")
    assert fetched() == [first, second]
    assert first.read_text() == "eins"
    with pytest.raises(DataError, match="matches no file"):
        download(files_config(f"file://{tmp_path}/*.md"), tmp_path / "out")
    with pytest.raises(DataError, match=r"gone\.txt: not found"):
        download(files_config(f"file://{tmp_path}/gone.txt"), tmp_path / "out")
