"""What the records of a dataset of up to a million partitions cost: CPU seconds and memory.

The stages shard, plan and train run on a simulated dataset, each in a process of its own; see
`benchmarks.scale_once`. The ratio is the CPU time of a partition among the most to that among the
fewest, which stays near 1 where the cost is linear. `docs/scale.md` says what of it comes first at
10 TB of text.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from benchmarks.report import Cell, publish, run, spread
from benchmarks.scale_once import (
    KEYS,
    PARTITIONS_PER_FILE,
    SHARD_BYTES,
    STAGES,
    configuration,
    write_listing,
)
from benchmarks.served import Store, served
from infini_model.data.manifest import SPLITS
from infini_model.data.shards.partition_store import RECORD

SIZES = (10_000, 100_000, 1_000_000)
MOST_GROWTH = 1.5
LISTED_AT_ONCE = 1000
WRITTEN = "2026-01-01T00:00:00.000Z"


class RecordsStore(Store):
    """An S3 bucket of small files in `folder`, that lists partitions of which it has only keys."""

    folder: Path
    listed: list[str]

    def do_GET(self) -> None:  # noqa: N802 -- the base class calls it so
        """Answer with a file, or with a page of a listing."""
        split = urlsplit(self.path)
        query = parse_qs(split.query)
        if "list-type" not in query:
            path = self._file()
            self._answer(path.read_bytes() if path.exists() else None)
            return
        prefix, after = query["prefix"][0], int(query.get("continuation-token", ["0"])[0])
        self._answer(self._page(prefix, after))

    def do_PUT(self) -> None:  # noqa: N802 -- the base class calls it so
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
        with served(RecordsStore, folder=folder, listed=[]):
            for stage in STAGES:
                ended = run(["-m", "benchmarks.scale_once", stage, name])
                seconds |= json.loads(ended.last_line)
                peaks[stage] = ended.peak_bytes
        (manifest,) = (folder / "bucket").rglob("manifest.json")
        return Simulated(seconds, peaks, manifest.stat().st_size)


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
    options = parser.parse_args()
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
