"""A manifest takes little memory: there may be a million partitions, with three shards each."""

import dataclasses
import tracemalloc

from infini_model.data.manifest import Shard, parse_record
from infini_model.data.shards.partitions import PartitionRecord

SHARDS = 10_000
# The strings of a shard take 260.
MOST_BYTES = 600


def test_a_shard_takes_little_more_than_its_strings() -> None:
    shard = Shard(
        file="train-0.arrow",
        path=f"{'k' * 32}/train-0.arrow",
        documents=8000,
        tokens=8_000_000,
        bytes=16_000_000,
        sha256="a" * 64,
    )
    shards = [dataclasses.replace(shard, tokens=number) for number in range(SHARDS)]
    record = PartitionRecord(
        documents=0, bytes=0, skipped=0, shards={"train": shards, "validation": [], "test": []}
    )
    content = record.model_dump_json().encode()
    tracemalloc.start()
    again = parse_record(content, "here", PartitionRecord)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert again == record
    assert taken < MOST_BYTES * SHARDS
