"""Run by `benchmarks.scale`: one stage on a dataset of many partitions, simulated.

The arguments are the stage and a folder that the stages share:

- `shard` divides the source, and puts the dataset together as if all partitions had been made.
- `plan` finds the same dataset again, as on a night without new text.
- `train` opens its training split.

No text is read and no shard is written: the source is a listing of invented objects, and the store,
which the parent process serves, lists shards that do not exist. Their records are what it would
have answered. All else is the program's own code. Prints one line of JSON: the CPU seconds of each
step, which do not grow with the other load of the machine.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from infini_model.__main__ import OBJECTS_BETWEEN_COLLECTIONS
from infini_model.config import MEBIBYTE, Config
from infini_model.data.keeping.stored_datasets import StoredDatasets
from infini_model.data.manifest import (
    SPLITS,
    Shard,
    latest_dataset,
    parse_record,
    read_record,
    write_record,
)
from infini_model.data.shards.dataset import RequestedDataset, requested_dataset
from infini_model.data.shards.folder import make_manifest
from infini_model.data.shards.partitions import PartitionRecord
from infini_model.data.shards.plan import plan_dataset
from infini_model.data.shards.stream import open_split
from infini_model.data.sources.files import FileRange, Listing, SourceFile

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
            )
        )
        for number in range(partitions // PARTITIONS_PER_FILE)
    ]
    write_record(folder / LISTING, Listing(ranges=ranges))


def _record() -> bytes:
    """The record of the partition `KEY`."""
    shards = {
        split: [
            Shard(
                file=f"{split}-0.arrow",
                path=f"{KEY}/{split}-0.arrow",
                documents=8000,
                tokens=8_000_000,
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
    wanted = _timed(seconds, "divide", lambda: _requested(config, listing))
    (folder / KEYS).write_text("\n".join(wanted.partition_keys))
    template = _record()

    def records() -> list[PartitionRecord]:
        named = (template.replace(KEY.encode(), key.encode()) for key in wanted.partition_keys)
        return [parse_record(content, ADDRESS, PartitionRecord) for content in named]

    made = _timed(seconds, "read records", records)
    record = wanted.recipe.tokenizer
    manifest = _timed(
        seconds,
        "make manifest",
        lambda: make_manifest(config.data.name, wanted.partition_keys, record, made, 0.0),
    )
    datasets = StoredDatasets(f"{ADDRESS}/datasets", config.run.datasets_dir)
    _timed(seconds, "write it", lambda: datasets.write(manifest, wanted.tokenizer))
    return seconds


def _requested(config: Config, listing: Listing) -> RequestedDataset:
    store = config.run.datasets_store
    return requested_dataset(listing, config.data, config.run.datasets_dir, store)


def plan(config: Config, listing: Listing, _folder: Path) -> Seconds:
    """Find the dataset."""
    seconds: Seconds = {}
    plan = _timed(seconds, "plan", lambda: plan_dataset(listing, config))
    assert plan.intact
    return seconds


def train(config: Config, _listing: Listing, _folder: Path) -> Seconds:
    """Open the training split."""
    seconds: Seconds = {}
    folder = latest_dataset(config.run.datasets_dir)
    _timed(seconds, "open split", lambda: open_split(folder, "train"))
    return seconds


STAGES = {each.__name__: each for each in (shard, plan, train)}


def configuration() -> Config:
    """Of a dataset in the store."""
    return Config.model_validate({"run": {"output_dir": ADDRESS}})


def main(stage: str, folder: Path) -> None:
    """Run a stage and print the seconds of its steps."""
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    listing = read_record(folder / LISTING, Listing)
    print(json.dumps(STAGES[stage](configuration(), listing, folder)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
