"""Partitions as the tasks of a Ray cluster, a bounded number in flight.

Nothing is kept in Ray: a task gets its spec and gives back an error, if any, and all else is in the
store. So a worker or a node that is lost costs the partitions that it was making, and the loss of
the cluster is cured by the same command.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from infini_model.config import DataConfig
from infini_model.config.locations import is_url
from infini_model.data.shards.on_ray.room import check_room, reserved
from infini_model.data.shards.on_ray.worker import Job
from infini_model.data.shards.partition_store import PARTITIONS, PartitionStore
from infini_model.data.shards.partitions import PartitionSpec
from infini_model.data.shards.workers import why_unsupported
from infini_model.data.threads import Advance
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.runtime.errors import StageError, UnreachableError, UserError
from infini_model.runtime.on_ray.joining import joined
from infini_model.runtime.on_ray.nodes import Failure, marked, on_node, sources_fingerprint

log = logging.getLogger(__name__)

# Enough to keep all nodes busy between two looks, and to let a cluster that grows see the demand.
LEAST_IN_FLIGHT, TASKS_A_SLOT = 256, 2
POLL_SECONDS, CANCEL_SECONDS = 0.1, 10.0
# A partition that has lost so many workers is the likely cause.
MOST_LOSSES = 5


class RayEngine:
    """One Ray task a partition, the largest first."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer) -> None:
        self._address, self._device = config.ray_address, "cpu"
        self._needs = reserved(config)
        if config.device != "cuda":
            return
        reason = why_unsupported(tokenizer)
        if reason is None:
            self._device = "cuda:0"
            return
        log.warning("data.device=cuda has no effect: %s; tokenising on CPUs", reason)
        del self._needs["GPU"]

    def make(self, specs: Sequence[PartitionSpec], store: PartitionStore, advance: Advance) -> None:
        """Make the partitions of `specs`; a lost worker or node costs those that it was making.

        Raises also what `joined` and `check_room` do, and `StageError` for a partition that lost
        its worker time and again.
        """
        with joined(self._address, "data") as address, _job(store, self._device) as job:
            import ray

            check_room(self._needs, ray.nodes(), address)
            log.info("making %d partitions on the Ray cluster at %s", len(specs), address)
            _run(job, specs, self._needs, advance)


@contextlib.contextmanager
def _job(store: PartitionStore, device: str) -> Iterator[Job]:
    """What the tasks have in common. A file marks the folder of the datasets meanwhile."""
    place, sources = store.place.removesuffix(f"/{PARTITIONS}"), sources_fingerprint()
    if is_url(place):
        yield Job(place=place, mark=None, sources=sources, device=device)
        return
    with marked(Path(place)) as mark:
        yield Job(place=str(mark.parent), mark=str(mark), sources=sources, device=device)


def _run(
    job: Job, specs: Sequence[PartitionSpec], needs: Mapping[str, float], advance: Advance
) -> None:
    """Run the tasks. When this ends, by whatever error, none of them is under way."""
    import ray

    task = _task(needs)
    common = job.model_dump_json()
    waiting = deque(sorted(specs, key=lambda spec: -spec.bytes))
    running: dict[Any, PartitionSpec] = {}
    losses: Counter[str] = Counter()
    try:
        while waiting or running:
            window = _window(needs, ray.cluster_resources())
            while waiting and len(running) < window:
                spec = waiting.popleft()
                running[task.remote(common, spec.model_dump_json())] = spec
            done, _ = ray.wait(list(running), num_returns=len(running), timeout=POLL_SECONDS)
            for reference in done:
                spec = running.pop(reference)
                if _is_made(reference, spec, losses):
                    advance(spec.bytes)
                else:
                    waiting.append(spec)
    finally:
        for reference in running:
            ray.cancel(reference)
        if running:
            ray.wait(list(running), num_returns=len(running), timeout=CANCEL_SECONDS)


def _task(needs: Mapping[str, float]) -> Any:
    """The remote function. Losses are counted here, so that Ray repeats nothing by itself."""
    import ray

    return ray.remote(
        num_cpus=needs["CPU"],
        num_gpus=needs.get("GPU", 0),
        memory=int(needs.get("memory", 0)) or None,
        max_retries=0,
    )(on_node("infini_model.data.shards.on_ray.worker", "make_partition"))


def _window(needs: Mapping[str, float], cluster: Mapping[str, float]) -> int:
    """How many tasks may be in flight on a cluster that has these resources now."""
    slots = min(int(cluster.get(name, 0.0) / need) for name, need in needs.items())
    return max(LEAST_IN_FLIGHT, TASKS_A_SLOT * slots)


def _is_made(reference: Any, spec: PartitionSpec, losses: Counter[str]) -> bool:
    """Whether a task that has ended made its partition, or its worker was lost.

    Raises the error that it reports, and `StageError` after `MOST_LOSSES`.
    """
    import ray
    from ray import exceptions

    lost = (
        exceptions.WorkerCrashedError,
        exceptions.OutOfMemoryError,
        exceptions.LocalRayletDiedError,
        exceptions.NodeDiedError,
        exceptions.ObjectLostError,
    )
    try:
        failure: Failure | None = ray.get(reference)
    except lost as error:
        losses[spec.key] += 1
        reason = str(error).partition("\n")[0]
        message = f"partition {spec.key}: its worker was lost ({type(error).__name__}: {reason})"
        if losses[spec.key] == MOST_LOSSES:
            raise StageError(f"{message}, for the {MOST_LOSSES}th time") from error
        log.warning("%s; making it again", message)
        return False
    if failure is None:
        return True
    kind, message = failure
    raise UserError(message) if kind == "user" else UnreachableError(message)
