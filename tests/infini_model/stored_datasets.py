"""Dataset folders whose shards are in a store."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from infini_model.data.manifest import SPLITS, Split, read_manifest
from infini_model.runtime.object_stores.object_store import ObjectStore


def without_shards(
    dataset: Path, folder: Path, partitions: str, splits: Sequence[Split] = SPLITS
) -> Path:
    """A copy of a dataset folder that has the shards of these splits below an address."""
    shutil.copytree(dataset, folder)
    (folder / "origin.json").write_text(json.dumps({"partitions": partitions}))
    for split in splits:
        for shard in read_manifest(dataset).splits[split].shards:
            ObjectStore(partitions).upload(shard.path, folder / split / shard.file)
            (folder / split / shard.file).unlink()
    return folder
