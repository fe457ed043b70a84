"""What runs on a node of the cluster: one partition a task, from the store to the store."""

from __future__ import annotations

from pathlib import Path

from infini_model.config.locations import is_url, working_folder
from infini_model.data.keeping.datasets import datasets_in
from infini_model.data.shards.partition_store import PartitionStore
from infini_model.data.shards.partitions import PartitionSpec
from infini_model.data.tokenizers.load import check_device, on_device
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.runtime.on_ray.nodes import check_mark, check_sources
from infini_model.runtime.records import Record


class Job(Record):
    """What all tasks of a job have in common.

    `place` is the folder or the address of the datasets; `mark` a file in that folder, which a node
    that sees the same one sees too; `sources` the fingerprint of this package; `device` where to
    tokenise.
    """

    place: str
    mark: str | None
    sources: str
    device: str


class _Bench:
    """What a worker process keeps from one task of its job to the next."""

    def __init__(self, job: Job, spec: PartitionSpec) -> None:
        check_sources(job.sources)
        if job.mark is not None:
            check_mark(Path(job.mark), "use one that all nodes share, or an object store")
        check_device(job.device)
        self.store = _open_store(job.place)
        self.tokenizer: Tokenizer = on_device(self.store.tokenizer(spec), job.device)


_benches: dict[str, _Bench] = {}


def make_partition(job: str, spec: str) -> None:
    """Make the partition of a spec, unless it stands; both arguments are JSON."""
    wanted = PartitionSpec.model_validate_json(spec)
    if job not in _benches:
        _benches[job] = _Bench(Job.model_validate_json(job), wanted)
    bench = _benches[job]
    bench.store.make(wanted, bench.tokenizer, lambda _: None)


def _open_store(place: str) -> PartitionStore:
    if is_url(place):
        return datasets_in(working_folder(place), place).partitions
    return datasets_in(Path(place), None).partitions
