"""What the records of a dataset of up to a million partitions cost: CPU seconds and memory.

Three stages run on a simulated dataset, each in a process of its own:

- `shard` divides the source, and puts the dataset together as if all partitions had been made.
- `plan` finds the same dataset again, as on a night without new text.
- `train` reads its manifest, as every rank does.

No text is read and no shard is written: the source is a listing of invented objects, and the store,
which this program serves, lists shards that do not exist. Their records are what it would have
answered. All else is the program's own code. CPU seconds do not grow with the other load of the
machine. The ratio is the CPU time of a partition among the most to that among the fewest, which
stays near 1 where the cost is linear. `docs/measurements.md` says what comes first at
10 TB of text.
"""

from __future__ import annotations

import argparse
import gc
import http.server
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import parse_qs, urlsplit

from benchmarks.report import Cell, publish, run, spread
from infini_model.__main__ import OBJECTS_BETWEEN_COLLECTIONS
from infini_model.config import MEBIBYTE, Config
from infini_model.data.build import plan_dataset, requested_dataset
from infini_model.data.datasets import RECORD
from infini_model.data.manifest import LATEST, SPLITS, Shard, read_manifest
from infini_model.data.partitions import PartitionRecord
from infini_model.data.sources.files import FileRange, Listing, SourceFile
from infini_model.data.store import StoredDatasets
from infini_model.runtime.records import parse_record, read_record, write_record

SIZES = (10_000, 100_000, 1_000_000)
MOST_GROWTH = 1.5
LISTED_AT_ONCE = 1000
WRITTEN = "2026-01-01T00:00:00.000Z"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "someone",
    "AWS_SECRET_ACCESS_KEY": "else",
    "AWS_ALLOW_HTTP": "true",
    "AWS_REGION": "us-east-1",
}
ADDRESS = "s3://bucket/team"
PARTITIONS_PER_FILE = 32
SHARD_BYTES = 16_000_000
KEY = "k" * 32
KEYS, LISTING = "keys", "listing.json"
Made = TypeVar("Made")
Seconds = dict[str, float]


def _timed(seconds: Seconds, name: str, work: Callable[[], Made]) -> Made:
    began = time.process_time()
    made = work()
    seconds[name] = time.process_time() - began
    return made


def write_listing(config: Config, partitions: int, folder: Path) -> None:
    """The listing of a source that is divided into so many partitions, a multiple of 32."""
    partition_bytes = config.data.partition_megabytes * MEBIBYTE
    ranges = [
        FileRange(
            file=SourceFile(
                address=f"s3://bucket/crawl/part-{number:08d}.jsonl",
                bytes=PARTITIONS_PER_FILE * partition_bytes,
                fingerprint=f"etag:{number:032x}",
                version=f"{number:032x}",
            ),
            format="jsonl",
        )
        for number in range(partitions // PARTITIONS_PER_FILE)
    ]
    write_record(folder / LISTING, Listing(sources={"": ranges}))


def _record() -> bytes:
    """The record of the partition `KEY`."""
    shards = {
        split: [
            Shard(
                file=f"{split}-0.arrow",
                path=f"{KEY}/{split}-0.arrow",
                documents=8000,
                tokens=8_000_000,
                start=536,
                bytes=SHARD_BYTES,
                sha256="a" * 64,
            )
        ]
        for split in SPLITS
    }
    record = PartitionRecord(documents=24_000, bytes=32 * MEBIBYTE, skipped=0, shards=shards)
    return record.model_dump_json(indent=2).encode()


def shard(config: Config, listing: Listing, folder: Path) -> Seconds:
    """Divide the source, read the records, and make and write the manifest."""
    seconds: Seconds = {}
    data, run = config.data, config.run
    datasets = StoredDatasets(f"{ADDRESS}/datasets", run.datasets_dir)
    wanted = _timed(seconds, "divide", lambda: requested_dataset(listing, data, datasets))
    (folder / KEYS).write_text("\n".join(wanted.keys[""]))
    template = _record()

    def records() -> dict[str, PartitionRecord]:
        named = ((key, template.replace(KEY.encode(), key.encode())) for key in wanted.keys[""])
        return {key: parse_record(content, ADDRESS, PartitionRecord) for key, content in named}

    made = _timed(seconds, "read records", records)
    manifest = _timed(seconds, "make manifest", lambda: wanted.manifest(made, 0.0))
    _timed(seconds, "write it", lambda: datasets.write(manifest, wanted.tokenizer))
    return seconds


def plan(config: Config, listing: Listing, _folder: Path) -> Seconds:
    """Find the dataset."""
    seconds: Seconds = {}
    plan = _timed(seconds, "plan", lambda: plan_dataset(listing, config))
    assert plan.intact
    return seconds


def train(config: Config, _listing: Listing, _folder: Path) -> Seconds:
    """Read the manifest, as every rank does."""
    seconds: Seconds = {}
    folder = (config.run.datasets_dir / LATEST).resolve()
    _timed(seconds, "read manifest", lambda: read_manifest(folder))
    return seconds


STAGES = {each.__name__: each for each in (shard, plan, train)}


def configuration() -> Config:
    """Of a dataset in the store."""
    return Config.model_validate({"run": {"output_dir": ADDRESS}})


class RecordsStore(http.server.BaseHTTPRequestHandler):
    """An S3 bucket of small files in `folder`, that lists partitions of which it has only keys."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    folder: Path
    listed: list[str]

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer with a file, or with a page of a listing."""
        split = urlsplit(self.path)
        query = parse_qs(split.query)
        if "list-type" not in query:
            path = self._file()
            self._answer(path.read_bytes() if path.exists() else None)
            return
        prefix, after = query["prefix"][0], int(query.get("continuation-token", ["0"])[0])
        self._answer(self._page(prefix, after))

    def do_PUT(self) -> None:
        """Keep a file."""
        path = self._file()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(b"")

    def _file(self) -> Path:
        return self.folder / urlsplit(self.path).path.lstrip("/")

    def _page(self, prefix: str, after: int) -> bytes:
        bucket = self.folder / "bucket"
        each = 1 + len(SPLITS)
        if prefix.endswith(".partitions/"):
            keys = self._keys()
            page = keys[after // each : (after + LISTED_AT_ONCE) // each]
            names = [RECORD, *(f"{split}-0.arrow" for split in sorted(SPLITS))]
            found = [f"{prefix}{key}/{name}" for key in page for name in names]
            total = each * len(keys)
        else:
            files = sorted(path for path in (bucket / prefix).rglob("*") if path.is_file())
            found = [path.relative_to(bucket).as_posix() for path in files]
            total = len(found)
        more = after + len(found) < total
        token = f"<NextContinuationToken>{after + len(found)}</NextContinuationToken>"
        contents = "".join(
            f"<Contents><Key>{key}</Key><LastModified>{WRITTEN}</LastModified>"
            f"<ETag>&quot;{'e' * 32}&quot;</ETag><Size>{SHARD_BYTES}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for key in found
        )
        text = (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>'
            f"<IsTruncated>{str(more).lower()}</IsTruncated><KeyCount>{len(found)}</KeyCount>"
            f"{token if more else ''}{contents}</ListBucketResult>"
        )
        return text.encode()

    def _keys(self) -> list[str]:
        if not self.listed:
            self.listed += (self.folder / KEYS).read_text().split()
        return self.listed

    def _answer(self, content: bytes | None) -> None:
        self.send_response(HTTPStatus.NOT_FOUND if content is None else HTTPStatus.OK)
        self.send_header("Content-Length", str(len(content or b"")))
        self.send_header("ETag", f'"{"e" * 32}"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(content or b"")


def serve(folder: Path, tell: Connection) -> None:
    """Serve the store, in a process of its own; tells its port."""
    RecordsStore.folder, RecordsStore.listed = folder, []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), RecordsStore)
    tell.send(server.server_port)
    server.serve_forever()


@contextmanager
def served(folder: Path) -> Iterator[None]:
    """This process, and those that it starts, reach the store while the block runs."""
    heard, tell = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=serve, args=(folder, tell), daemon=True)
    server.start()
    os.environ |= CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{heard.recv()}"}
    try:
        yield
    finally:
        server.terminate()
        server.join()


class Simulated(NamedTuple):
    """The CPU seconds of each step, the peak memory of each stage, and the size of the manifest."""

    seconds: dict[str, float]
    peaks: dict[str, int]
    manifest_bytes: int


def simulate(partitions: int) -> Simulated:
    """Run the stages, each in a process of its own."""
    whole_files = partitions // PARTITIONS_PER_FILE * PARTITIONS_PER_FILE
    seconds: dict[str, float] = {}
    peaks: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["INFINI_CACHE_DIR"] = str(folder / "cache")
        write_listing(configuration(), whole_files, folder)
        with served(folder):
            for stage in STAGES:
                ended = run(["-m", "benchmarks.scale", "--stage", stage, name])
                seconds |= json.loads(ended.last_line)
                peaks[stage] = ended.peak_bytes
        (manifest,) = (folder / "bucket").rglob("manifest.json")
        return Simulated(seconds, peaks, manifest.stat().st_size)


def print_stage(stage: str, folder: str) -> None:
    """Run a stage in this process, and print the seconds of its steps as one line of JSON."""
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    listing = read_record(Path(folder) / LISTING, Listing)
    print(json.dumps(STAGES[stage](configuration(), listing, Path(folder))))


def _row(partitions: int, simulated: Simulated) -> dict[str, Cell]:
    row: dict[str, Cell] = {"partitions": partitions}
    row |= {f"{step}, s": seconds for step, seconds in simulated.seconds.items()}
    row |= {f"{stage}, peak MB": peak / 1e6 for stage, peak in simulated.peaks.items()}
    return row | {"manifest, MB": simulated.manifest_bytes / 1e6}


def main() -> None:
    """Simulate each size and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="skip larger sizes")
    parser.add_argument("--turns", type=int, default=3, help="times that each size is simulated")
    parser.add_argument("--stage", nargs=2, metavar=("STAGE", "FOLDER"), help="only run this one")
    options = parser.parse_args()
    if options.stage:
        print_stage(*options.stage)
        return
    sizes = [size for size in SIZES if size <= options.largest]
    turns = [{size: simulate(size) for size in sizes} for _ in range(options.turns)]
    growth = spread(
        [
            (sum(turn[sizes[-1]].seconds.values()) / sizes[-1])
            / (sum(turn[sizes[0]].seconds.values()) / sizes[0])
            for turn in turns
        ]
    )
    name = "CPU seconds of a partition, most to fewest"
    publish(
        "scale",
        "The records of a dataset, all partitions of which stand (CPU seconds)",
        [_row(size, turns[0][size]) for size in sizes],
        {name: growth},
        limits={name: MOST_GROWTH},
    )


if __name__ == "__main__":
    main()
