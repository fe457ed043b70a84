"""What runs on a node of the cluster: one partition a task, from the store to the store."""

from __future__ import annotations

import functools
import socket
from pathlib import Path

import infini_model
from infini_model.config.places import is_url, working_folder
from infini_model.data.keeping.datasets import datasets_in
from infini_model.data.manifest import Record
from infini_model.data.shards.partition_store import PartitionStore
from infini_model.data.shards.partitions import PartitionSpec
from infini_model.data.tokenizers.load import check_device, on_device
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError, UserError

# Kinds of failure, as in `infini_model.runtime.stage_protocol`; the message follows.
Failure = tuple[str, str]


class Job(Record):
    """What all tasks of a job have in common.

    `place` is the folder or the address of the datasets; `token` a file in that folder, by which a
    node shows that it sees the same one; `sources` the fingerprint of this package; `device` where
    to tokenise.
    """

    place: str
    token: str | None
    sources: str
    device: str


class _Bench:
    """What a worker process keeps from one task of its job to the next."""

    def __init__(self, job: Job, spec: PartitionSpec) -> None:
        if sources_fingerprint() != job.sources:
            raise UserError(
                f"{Path(infini_model.__file__).parent}: is not the infini_model that started the "
                "job; install the same one on every node"
            )
        if job.token is not None and not Path(job.token).exists():
            raise DataError(
                f"{job.place}: is not the folder of this name on the machine that started the job; "
                "use one that all nodes share, or an object store"
            )
        check_device(job.device)
        self.store = _open_store(job.place)
        self.tokenizer: Tokenizer = on_device(self.store.tokenizer(spec), job.device)


_benches: dict[str, _Bench] = {}


def make(job: str, spec: str) -> Failure | None:
    """Make the partition of a spec, unless it stands; both arguments are JSON.

    Returns what a user can mend, with the name of this node; raises anything else.
    """
    wanted = PartitionSpec.model_validate_json(spec)
    try:
        if job not in _benches:
            _benches[job] = _Bench(Job.model_validate_json(job), wanted)
        bench = _benches[job]
        bench.store.make(wanted, bench.tokenizer, lambda _: None)
    except UserError as error:
        return "user", f"{error} (on {socket.gethostname()})"
    except ConnectionError as error:
        return "network", f"{error} (on {socket.gethostname()})"
    return None


def _open_store(place: str) -> PartitionStore:
    if is_url(place):
        return datasets_in(working_folder(place), place).partitions
    return datasets_in(Path(place), None).partitions


@functools.cache
def sources_fingerprint() -> str:
    """A hash of the source files of this package: machines with equal ones run the same code."""
    root = Path(infini_model.__file__).parent
    return storage.content_key(
        {str(path.relative_to(root)): storage.sha256(path) for path in root.rglob("*.py")}
    )
