"""Requests to an object store, by kind: what the stages ask for, counted by the server.

The source, JSON lines of a few partitions of the default size in each file, and the dataset are in
a bucket of moto's S3 server, which logs a line for each request. The cases follow one another: the
stages download, plan and shard make all partitions, then find nothing new, then one file more; at
last the dataset is copied to the machine, as before a training. They run on a small source and on a
larger one.

"a partition" is the difference between the two for each partition more: what a partition costs,
without what every run costs. A listing, of up to a thousand objects, is one request at this size.
The tokens are bytes: shards are as large as those of a vocabulary of more than 65,536 tokens, four
bytes for each, on English text. Multipart uploads count as their requests: PUT and POST.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from benchmarks.incremental import run_stages
from benchmarks.report import Cell, Ratio, publish
from benchmarks.served import CREDENTIALS
from infini_model.config import MEBIBYTE, Config
from infini_model.data.keeping.staging import staged_dataset
from infini_model.data.manifest import latest_dataset
from infini_model.runtime.object_stores.object_store import ObjectStore

KINDS = ("LIST", "GET", "HEAD", "PUT", "POST")
FIRST, NOTHING, MORE, COPY = "all new", "nothing new", "one file more", "copied to a machine"
REQUEST = re.compile(r'"([A-Z]+) (/\S*) HTTP/')
LISTENING = re.compile(r"Running on (http://127\.0\.0\.1:\d+)\s")
DOCUMENT_BYTES = 4000


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.requests",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--partition-megabytes", type=int, default=32)
    parser.add_argument("--partitions-per-file", type=int, default=2)
    return parser.parse_args()


class Log:
    """The server's log of requests; `new` counts those since it was last called, by kind."""

    def __init__(self, path: Path) -> None:
        self._path, self._seen = path, 0

    def new(self) -> Counter[str]:
        """The number of requests of each kind."""
        text = self._path.read_text(errors="replace")
        fresh, self._seen = text[self._seen :], len(text)
        return Counter(_kind(method, path) for method, path in REQUEST.findall(fresh))


def _kind(method: str, path: str) -> str:
    return "LIST" if method == "GET" and "list-type" in parse_qs(urlsplit(path).query) else method


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[Log]:
    """moto's server, which this process and those that it starts reach while the block runs."""
    path = folder / "log"
    with path.open("w") as log:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
    try:
        while not (found := LISTENING.search(path.read_text())):
            if server.poll() is not None:
                raise SystemExit(path.read_text())
            time.sleep(0.1)
        os.environ |= CREDENTIALS | {"AWS_ENDPOINT_URL": found[1]}
        os.environ["INFINI_CACHE_DIR"] = str(folder / "cache")
        yield Log(path)
    finally:
        server.kill()
        server.wait()


def count(files: int, options: argparse.Namespace, folder: Path) -> dict[str, Counter[str]]:
    """The requests of each case on so many files; "partitions" counts those it needed."""
    folder.mkdir()
    with s3_server(folder) as log:
        bucket = f"s3://bucket-{files}"
        _make_bucket(bucket)
        config = Config.model_validate(
            {
                "run": {"output_dir": f"{bucket}/team"},
                "data": {
                    "source": {"paths": [f"{bucket}/texts/*.jsonl"]},
                    "partition_megabytes": options.partition_megabytes,
                },
            }
        )
        file = folder / "config.json"
        file.write_text(config.model_dump_json(), encoding="utf-8")
        size = options.partitions_per_file * options.partition_megabytes * MEBIBYTE
        for number in range(files):
            _write_source(bucket, number, size)
        found: dict[str, Counter[str]] = {}
        for case in (FIRST, NOTHING, MORE):
            if case == MORE:
                _write_source(bucket, files, size)
            log.new()
            ran = run_stages(file, "in-one-process")
            found[case] = log.new() + Counter(partitions=ran.made + ran.reused)
        with staged_dataset(latest_dataset(config.run.datasets_dir)):
            found[COPY] = log.new() + Counter(partitions=found[MORE]["partitions"])
        return found


def _make_bucket(bucket: str) -> None:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=os.environ["AWS_ENDPOINT_URL"],
        region_name=CREDENTIALS["AWS_REGION"],
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    )
    client.create_bucket(Bucket=bucket.removeprefix("s3://"))


def _write_source(bucket: str, number: int, size: int) -> None:
    """A file of different documents, a little smaller than `size`."""
    line = json.dumps({"text": f"{number:06d} {'x' * 12} " + "word " * (DOCUMENT_BYTES // 5)})
    lines = (line.replace("x" * 12, f"{each:012d}") for each in range(size // (len(line) + 1)))
    ObjectStore(f"{bucket}/texts").write(f"{number:03d}.jsonl", "\n".join(lines).encode())


def main() -> None:
    """Count and print."""
    options = parse()
    with tempfile.TemporaryDirectory() as name:
        counts = [count(files, options, Path(name) / str(files)) for files in (1, 3)]
    rows: list[dict[str, Cell]] = []
    ratios: dict[str, Ratio] = {}
    for case in (FIRST, NOTHING, MORE, COPY):
        small, large = (each[case] for each in counts)
        more = large["partitions"] - small["partitions"]
        row: dict[str, Cell] = {"": case, "partitions": large["partitions"]}
        row |= {kind: large[kind] for kind in KINDS}
        each = {kind: (large[kind] - small[kind]) / more for kind in KINDS}
        rows.append(row | {f"{kind}, a partition": number for kind, number in each.items()})
        total = sum(each.values())
        if total > 0:
            ratios[f"requests of a partition, {case}"] = Ratio(total, total, total)
    publish("requests", "Requests to an object store", rows, ratios)


if __name__ == "__main__":
    main()
