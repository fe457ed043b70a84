"""A Hugging Face hub on this machine: repositories of files, and what was asked of it."""

import base64
import contextlib
import dataclasses
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_secret"
UPLOADS = (
    r"/api/(?P<create>repos/create)|/api/(?P<card>validate-yaml)|/storage/(?P<object>\w+)"
    r"|/api/models/(?P<preupload>[^/]+/[^/]+)/preupload/main"
    r"|/api/models/(?P<commit>[^/]+/[^/]+)/commit/main"
    r"|/(?P<batch>[^/]+/[^/]+)\.git/info/lfs/objects/batch"
)


@dataclasses.dataclass(frozen=True)
class Request:
    method: str
    path: str
    range: str | None
    authorized: bool
    sent: int


@dataclasses.dataclass
class Repository:
    """The files of the main branch, and those of other `refs` such as `refs/tags/v1`."""

    files: dict[str, bytes]
    gated: bool = False
    refs: dict[str, dict[str, bytes]] = dataclasses.field(default_factory=dict)

    @property
    def all_refs(self):
        others = {ref: Repository(files, self.gated) for ref, files in self.refs.items()}
        return {"refs/heads/main": self} | others

    def at(self, revision):
        """The repository as it is at a ref, the name of one, or a commit; else None."""
        for ref, repository in self.all_refs.items():
            if revision in (ref, ref.split("/", 2)[2], repository.commit):
                return repository
        return None

    @property
    def commit(self):
        return git_id("".join(f"{p} {git_id(data)}" for p, data in self.files.items()).encode())

    def is_lfs(self, path):
        return path.endswith((".parquet", ".gz", ".gguf", ".png", ".zip", ".safetensors"))

    def entry(self, path):
        data = self.files[path]
        entry = {"type": "file", "path": path, "size": len(data), "oid": git_id(data)}
        if self.is_lfs(path):
            lfs = {"oid": sha256(data), "size": len(data), "pointerSize": 130}
            entry |= {"oid": git_id(json.dumps(lfs).encode()), "lfs": lfs}
        return entry

    def tree(self, folder, recursive):
        prefix = f"{folder}/" if folder else ""
        names = [name for name in self.files if name.startswith(prefix)]
        folders = {str(above) for name in names for above in PurePosixPath(name).parents}
        folders = [each for each in folders - {"."} if each.startswith(prefix)]
        entries = [{"type": "directory", "path": f, "size": 0, "oid": git_id(b"")} for f in folders]
        entries += [self.entry(name) for name in names]
        if not recursive:
            entries = [entry for entry in entries if "/" not in entry["path"][len(prefix) :]]
        return sorted(entries, key=lambda entry: entry["path"])


def git_id(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sha256(data):
    return hashlib.sha256(data).hexdigest()


class LocalHub(ThreadingHTTPServer):
    """`repositories` are served at `address`; `cuts` bodies are cut in the middle, `busy` refused;
    without `ranges` files are sent whole; a `held` file is not sent until `released` is set. What
    is sent is said to have the `encoding`. Large files lie on another host, as the hub's do.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.storage = f"http://localhost:{self.server_port}/storage"
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.cuts = self.busy = 0
        self.ranges = True
        self.encoding: str | None = None
        self.held: bytes | None = None
        self.released = threading.Event()
        self.uploaded: dict[str, bytes] = {}
        self.xet_storage: PurePosixPath | None = None

    def handle_error(self, request, client_address):
        pass


@contextlib.contextmanager
def serve_hub():
    with LocalHub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LocalHub

    def do_GET(self):
        self.body = self.read_body()
        url = urlsplit(self.path)
        path = unquote(url.path)
        upload = re.fullmatch(UPLOADS, path)
        if upload is not None and self.command in ("POST", "PUT"):
            if self.headers.get("Authorization") != f"Bearer {TOKEN}" and "storage" not in path:
                self.answer(401, json.dumps({"error": "Invalid credentials"}).encode())
            else:
                getattr(self, f"take_{upload.lastgroup}")(upload[upload.lastgroup])
            return
        name = re.match(r"/(?:api/)?(?:datasets/|models/)?([^/]+/[^/]+)(?:/(.*))?$", path)
        if path.startswith("/storage/"):
            self.stored(path.rpartition("/")[2])
        elif name is None or name[1] not in self.server.repositories:
            self.refuse(401, "RepoNotFound")
        else:
            self.repository = self.server.repositories[name[1]]
            action, _, rest = (name[2] or "").partition("/")
            if action in ("revision", "tree", "paths-info", "resolve"):
                revision, rest = re.fullmatch(r"(refs/\w+/\w+|[^/]*)/?(.*)", rest).groups()
                self.repository = self.repository.at(revision)
                if self.repository is None:
                    self.refuse(404, "RevisionNotFound")
                    return
            getattr(self, action.replace("-", "_") or "revision")(rest, parse_qs(url.query))

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def read_body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def take_create(self, _):
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}"
        created = {"url": f"{self.server.address}/{name}", "name": name}
        if name in self.server.repositories:
            self.answer(409, json.dumps(created).encode())
        else:
            self.server.repositories[name] = Repository({".gitattributes": b""})
            self.give_json(created)

    def take_card(self, _):
        text = json.loads(self.body)["content"]
        if re.search(r"^license: apache-2.0$", text, re.MULTILINE):
            self.give_json({"errors": [], "warnings": []})
        else:
            errors = {"errors": [{"message": '"license" is unknown'}]}
            self.answer(400, json.dumps(errors).encode())

    def take_preupload(self, name):
        repository = self.server.repositories[name]
        modes = {True: "lfs", False: "regular"}
        paths = [file["path"] for file in json.loads(self.body)["files"]]
        files = [{"path": p, "uploadMode": modes[repository.is_lfs(p)]} for p in paths]
        self.give_json({"files": [file | {"shouldIgnore": False} for file in files]})

    def take_batch(self, _):
        objects = json.loads(self.body)["objects"]
        for each in objects:
            if each["oid"] not in self.server.uploaded:
                href = f"{self.server.storage}/{each['oid']}"
                each["actions"] = {"upload": {"href": href}}
        self.give_json({"objects": objects, "transfer": "basic"})

    def take_object(self, oid):
        if self.server.busy:
            self.server.busy -= 1
            self.answer(403, b"", {})
            return
        assert sha256(self.body) == oid
        self.server.uploaded[oid] = self.body
        self.answer(200, b"", {})

    def xet_write_token(self, _, query):
        """Large files go to a folder that only `hf_xet` reads; a commit has their hashes."""
        place = {"casUrl": f"local://{self.server.xet_storage}", "accessToken": "xet"}
        self.give_json(place | {"exp": 1 << 40})

    def take_commit(self, name):
        repository = self.server.repositories[name]
        files = dict(repository.files)
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if self.server.xet_storage is not None:
                    self.server.uploaded[value["oid"]] = value["oid"].encode()
                files[value["path"]] = self.server.uploaded[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        repository.files = files
        place = f"{self.server.address}/{name}/commit/{repository.commit}"
        self.give_json({"commitUrl": place, "commitOid": repository.commit})

    def revision(self, _, query):
        self.give_json({"id": "team/data", "sha": self.repository.commit})

    def refs(self, _, query):
        found = {"branches": [], "tags": [], "converts": []}
        for ref, repository in self.repository.all_refs.items():
            _, kind, name = ref.split("/", 2)
            group = {"heads": "branches", "tags": "tags", "convert": "converts"}[kind]
            found[group].append({"name": name, "ref": ref, "targetCommit": repository.commit})
        self.give_json(found)

    def tree(self, folder, query):
        entries = self.repository.tree(folder, query.get("recursive") == ["true"])
        if not entries:
            self.refuse(404, "EntryNotFound")
            return
        self.give_json(entries)

    def paths_info(self, _, query):
        paths = parse_qs(self.body.decode())["paths"]
        files = [path for path in paths if path in self.repository.files]
        self.give_json([self.repository.entry(path) for path in files])

    def resolve(self, path, query):
        if self.repository.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            status = 403 if "Authorization" in self.headers else 401
            self.refuse(status, "GatedRepo")
        elif path not in self.repository.files:
            self.refuse(404, "EntryNotFound")
        else:
            data = self.repository.files[path]
            headers = {"X-Repo-Commit": self.repository.commit}
            if not self.repository.is_lfs(path):
                self.give(data, headers | {"ETag": f'"{git_id(data)}"'})
                return
            headers["X-Linked-ETag"] = f'"{sha256(data)}"'
            headers["X-Linked-Size"] = str(len(data))
            headers["Location"] = f"{self.server.storage}/{sha256(data)}?Signature=hf_signed"
            self.answer(302, b"", headers)

    def stored(self, name):
        each = (ref for one in self.server.repositories.values() for ref in one.all_refs.values())
        files = (data for repository in each for data in repository.files.values())
        data = next(data for data in files if sha256(data) == name)
        if data == self.server.held:
            self.server.released.wait()
        self.give(data, {})

    def give_json(self, value):
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def refuse(self, status, code):
        self.answer(status, b"", {"X-Error-Code": code})

    def give(self, data, headers):
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if self.server.busy:
            self.server.busy -= 1
            self.answer(503, b"", {})
        elif part and self.server.ranges:
            start, stop = int(part[1]), int(part[2] or len(data) - 1) + 1
            where = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
            self.answer(206, data[start:stop], headers | where)
        else:
            self.answer(200, data, headers)

    def answer(self, status, body, headers=None):
        headers = headers or {}
        self.send_response(status)
        if self.server.encoding and self.command == "GET":
            headers = headers | {"Content-Encoding": self.server.encoding}
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        if self.command == "HEAD":
            body = b""
        cut = status in (200, 206) and "api" not in self.path and len(body) > 1 and self.server.cuts
        if cut:
            self.server.cuts -= 1
            body = body[: len(body) // 2]
            self.close_connection = True
        # Before anything is sent: whoever has the answer may look at once.
        authorized, part = "Authorization" in self.headers, self.headers.get("Range")
        request = Request(self.command, unquote(self.path), part, authorized, len(body))
        self.server.requests.append(request)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass
