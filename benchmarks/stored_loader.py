"""Windows per second from a store that takes some time to answer, and a training's wait for them.

`infini` is this project's loader, which reads ahead of its known order. `in turn` reads the same
windows one after the other when their batch is wanted, by the same ranges. The store is a server on
this machine, in a process of its own, that lets every request wait. A step of training sleeps.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np

from benchmarks.report import Cell, Ratio, publish, speed_ratio, spread, take_turns
from benchmarks.served import Store, served
from infini_model.config import PackingConfig
from infini_model.data.loading.loader import Loader
from infini_model.data.loading.packing import pack
from infini_model.data.loading.windows import Batch, Windows
from infini_model.data.manifest import Shard
from infini_model.data.shards.stored.shards import StoredShards
from infini_model.data.shards.stream import TokenStream
from infini_model.data.shards.writing import write_shard
from infini_model.data.tokenizers.tokenizer import Ragged

OURS, PEER = "infini", "in turn"
SHAPES = ((8, 512), (8, 8192))
DTYPE = np.dtype(np.uint16)
DOCUMENT_TOKENS = 500


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stored_loader", description=__doc__)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--megabytes", type=float, default=16.0, help="size of a shard")
    parser.add_argument("--milliseconds", type=float, default=20.0, help="before an answer")
    parser.add_argument("--step-milliseconds", type=float, default=200.0, help="of training")
    parser.add_argument("--steps", type=int, default=20, help="of training, per turn")
    parser.add_argument("--batches", type=int, default=60, help="read without pause, per turn")
    parser.add_argument("--turns", type=int, default=3)
    return parser.parse_args()


class SlowStore(Store):
    """What a reader needs of S3: ranges of files in a folder, each with an entity tag."""

    folder: Path
    seconds: float

    def do_GET(self) -> None:  # noqa: N802 -- the base class calls it so
        """Answer with a range of an object."""
        time.sleep(self.seconds)
        path = self.folder / unquote(urlsplit(self.path).path).lstrip("/")
        first, last = map(int, re.findall(r"\d+", self.headers["Range"]))
        with path.open("rb") as file:
            file.seek(first)
            content = file.read(last + 1 - first)
        lines = [
            "HTTP/1.1 206 Partial Content",
            f"Content-Length: {len(content)}",
            f"Content-Range: bytes {first}-{first + len(content) - 1}/{path.stat().st_size}",
            f'ETag: "{hashlib.sha256(str(path).encode()).hexdigest()[:32]}"',
            "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT",
        ]
        self.wfile.write("\r\n".join([*lines, "", ""]).encode() + content)


def make_shards(folder: Path, count: int, megabytes: float) -> list[Shard]:
    """Shards of random tokens in `folder`."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    documents = max(1, int(megabytes * 1e6 / DTYPE.itemsize / DOCUMENT_TOKENS))
    records = []
    for number in range(count):
        tokens = documents * DOCUMENT_TOKENS
        ids = rng.integers(0, 1 << 16, tokens, DTYPE)
        path = folder / f"train-{number}.arrow"
        write_shard(path, Ragged(ids, np.arange(documents + 1) * DOCUMENT_TOKENS))
        records.append(
            Shard(
                file=path.name,
                path=f"{folder.name}/{path.name}",
                documents=documents,
                tokens=tokens,
                bytes=path.stat().st_size,
                sha256="",
            )
        )
    return records


def open_stored(shards: list[Shard], empty: Path, length: int) -> Windows:
    """The windows of shards that are all in the store."""
    everywhere = np.ones(len(shards), bool)
    stream = TokenStream(StoredShards(empty, shards, DTYPE, "s3://bucket", everywhere), 0)
    packing = PackingConfig(context_length=length)
    return Windows(stream, pack(stream, packing, length), False, "stored")


def in_turn(windows: Windows, loader: Loader) -> Iterator[list[Batch]]:
    """The batches of `loader`, each read when it is wanted, without read-ahead."""
    for consumed in itertools.count(0, loader.global_batch):
        yield [windows.gather(numbers) for numbers in loader.numbers(consumed)]


def seconds_per_window(batches: Iterator[list[Batch]], count: int) -> Callable[[], float]:
    """A peer for `take_turns` that reads batches without a pause."""

    def measure() -> float:
        began, windows = time.perf_counter(), 0
        for found in itertools.islice(batches, count):
            windows += sum(len(batch.tokens) for batch in found)
        return (time.perf_counter() - began) / windows

    next(batches)
    return measure


def share_of_waiting(
    batches: Iterator[list[Batch]], steps: int, seconds: float
) -> Callable[[], float]:
    """A peer for `take_turns`: the share of the time of a training that it waits, in %."""

    def measure() -> float:
        began, waited = time.perf_counter(), 0.0
        for _ in range(steps):
            asked = time.perf_counter()
            next(batches)
            waited += time.perf_counter() - asked
            time.sleep(seconds)
        return 100 * waited / (time.perf_counter() - began)

    next(batches)
    return measure


def compare(
    shards: list[Shard], empty: Path, batch: int, length: int, options: argparse.Namespace
) -> tuple[dict[str, Cell], Ratio]:
    """The table row of one batch shape, and our speed relative to that of reading in turn."""
    with Loader(open_stored(shards, empty, length), batch_size=batch) as loader:
        peers = {OURS: iter(loader), PEER: in_turn(open_stored(shards, empty, length), loader)}
        few = {OURS: options.batches * 10, PEER: options.batches}
        reads = {name: seconds_per_window(each, few[name]) for name, each in peers.items()}
        read = take_turns(reads, options.turns)
        seconds = options.step_milliseconds / 1000
        waits = {
            name: share_of_waiting(each, options.steps, seconds) for name, each in peers.items()
        }
        waited = take_turns(waits, options.turns)
    ratio = speed_ratio(read[OURS], read[PEER])
    row: dict[str, Cell] = {"batch": f"{batch} x {length}"}
    row |= {f"{name} windows/s": 1 / statistics.median(each) for name, each in read.items()}
    row[f"speed / {PEER}"] = ratio
    row |= {f"{name} waits, %": spread(each) for name, each in waited.items()}
    return row, ratio


def main() -> None:
    """Measure both shapes and print the results."""
    options = parse()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards = make_shards(folder / "bucket" / "part", options.shards, options.megabytes)
        (folder / "empty").mkdir()
        with served(SlowStore, folder=folder, seconds=options.milliseconds / 1000):
            compared = [compare(shards, folder / "empty", *shape, options) for shape in SHAPES]
    rows = [row for row, _ in compared]
    ratios = {f"{PEER}, {row['batch']}": ratio for row, ratio in compared}
    after = f"{options.milliseconds:g} ms"
    publish("stored_loader", f"Windows from a store that answers after {after}", rows, ratios)


if __name__ == "__main__":
    main()
