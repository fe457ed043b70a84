"""Dataset folders whose shards are in a store."""

import shutil
from pathlib import Path

from infini_model.data.manifest import ORIGIN, Origin, read_manifest
from infini_model.runtime.object_store import ObjectStore
from infini_model.runtime.records import write_record


def without_shards(dataset: Path, folder: Path, address: str) -> Path:
    """A copy of a dataset folder that has its shards in the datasets at an address."""
    shutil.copytree(dataset, folder)
    write_record(folder / ORIGIN, Origin(datasets=address))
    manifest = read_manifest(folder)
    for key in manifest.partitions:
        for path in (dataset.parent / ".partitions" / key).iterdir():
            ObjectStore(address).upload(f".partitions/{key}/{path.name}", path)
    for name, _ in manifest.files():
        (folder / name).unlink()
    return folder
