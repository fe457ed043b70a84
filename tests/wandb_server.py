"""A server that speaks with the client of Weights & Biases as far as runs and their metrics go."""

from __future__ import annotations

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer:
    """Keeps the rows and the summary of each run; may be down for a while, on the same port."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.rows: dict[str, dict[int, dict[str, Any]]] = {}
        self.summaries: dict[str, dict[str, Any]] = {}
        self.exits: dict[str, int] = {}
        self.names: dict[str, str] = {}
        self._port, self._server = port, None

    def start(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), self._handler())
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def steps(self, run: str) -> list[int]:
        """The step of each row, in the order in which the rows are kept."""
        return [row["_step"] for _, row in sorted(self.rows[run].items())]

    def answer(self, name: str, variables: dict[str, Any]) -> dict[str, Any]:
        """What the client asks for by GraphQL."""
        run = variables.get("name") or variables.get("run")
        entity = {"id": "e", "name": "team"}
        if name == "RunResumeStatus":
            rows = self.rows.get(run)
            if not rows:
                return {"model": None}
            last = json.dumps(rows[max(rows)])
            bucket = {
                "name": run,
                "displayName": self.names.get(run),
                "summaryMetrics": last,
                "logLineCount": 0,
                "historyLineCount": len(rows),
                "eventsLineCount": 0,
                "historyTail": json.dumps([last]),
                "eventsTail": "[]",
                "config": "{}",
                "tags": [],
                "wandbConfig": '{"t": 1}',
            }
            return {"model": {"id": "m", "name": "p", "entity": entity, "bucket": bucket}}
        if name == "UpsertBucket":
            if variables.get("displayName"):
                self.names[run] = variables["displayName"]
            project = {"id": "p", "name": variables["project"], "entity": entity}
            bucket = {"id": "YQ==", "name": run, "displayName": self.names.get(run)}
            bucket |= {"historyLineCount": len(self.rows.get(run, {})), "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": run not in self.rows}}
        if name == "CreateRunFiles":
            files = [
                {"name": file, "uploadUrl": f"{self.url}/uploads/{file}"}
                for file in variables["files"]
            ]
            return {"createRunFiles": {"runID": "YQ==", "uploadHeaders": [], "files": files}}
        if name == "Viewer":
            return {"viewer": {"id": "u", "entity": "team", "username": "u", "flags": "{}"}}
        return {}

    def keep(self, run: str, sent: dict[str, Any]) -> None:
        """Keep what the client streams of a run."""
        files = sent.get("files", {})
        if history := files.get("wandb-history.jsonl"):
            rows = self.rows.setdefault(run, {})
            for place, line in enumerate(history["content"], history["offset"]):
                rows[place] = json.loads(line)
        if summary := files.get("wandb-summary.json"):
            self.summaries[run] = json.loads(summary["content"][-1])
        if sent.get("complete"):
            self.exits[run] = sent["exitcode"]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                """Print nothing."""

            def do_POST(self) -> None:
                body = self._body()
                if "otel" in self.path:
                    return self._send({})
                sent = json.loads(body)
                if self.path == "/graphql":
                    data = server.answer(sent.get("operationName", ""), sent.get("variables", {}))
                    return self._send({"data": data})
                server.keep(self.path.split("/")[-2], sent)
                return self._send({})

            def do_PUT(self) -> None:
                self._body()
                self._send({})

            def do_GET(self) -> None:
                self.send_error(404)

            def _body(self) -> bytes:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                is_packed = self.headers.get("content-encoding") == "gzip"
                return gzip.decompress(body) if is_packed else body

            def _send(self, tree: dict[str, Any]) -> None:
                content = json.dumps(tree).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        return Handler
