"""Partitions as the tasks of a Ray cluster, a bounded number in flight.

Nothing is kept in Ray: a task gets its spec and gives back an error, if any, and all else is where
the datasets are. So a worker or a node that is lost costs the partitions that it was making, and
the loss of the cluster is cured by the same command.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infini_model.config import DataConfig
from infini_model.config.locations import is_url
from infini_model.data.datasets import Datasets
from infini_model.data.make_partition import Advance
from infini_model.data.manifest import TokenizerRecord
from infini_model.data.partitions import PartitionSpec
from infini_model.data.store import datasets_at
from infini_model.data.tokenizers.load import check_device, on_device, usable_device
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.runtime.errors import StageError, UnreachableError, UserError
from infini_model.runtime.ray import (
    Failure,
    check_mark,
    check_sources,
    connect,
    marked,
    on_node,
    sources_fingerprint,
)

log = logging.getLogger(__name__)

# Enough to keep all nodes busy between two looks, and to let a cluster that grows see the demand.
LEAST_IN_FLIGHT, TASKS_A_SLOT = 256, 2
POLL_SECONDS, CANCEL_SECONDS = 0.1, 10.0
# A partition that has lost so many workers is the likely cause.
MOST_LOSSES = 5
# The settings that reserve something for a task, by Ray's name of it.
KEYS = {"CPU": "data.ray_cpus", "GPU": "data.ray_gpus", "memory": "data.ray_memory_gigabytes"}


class RayEngine:
    """One Ray task a partition, the largest first."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer) -> None:
        device = usable_device(tokenizer, config.device)
        self._config = config.model_copy(update={"device": device})

    def make(self, specs: Sequence[PartitionSpec], datasets: Datasets, advance: Advance) -> None:
        """Make the partitions of `specs`; a lost worker or node costs those that it was making.

        When this ends, by whatever error, no task is under way. Raises also what `connect` and
        `check_resources` do, and `StageError` for a partition that lost its worker time and again.
        """
        config, place = self._config, datasets.place
        with connect("data.engine") as address, contextlib.ExitStack() as stack:
            import ray

            needs = reserved(config)
            check_resources(needs, ray.nodes(), address)
            mark = None
            if not is_url(place):
                mark = stack.enter_context(marked(Path(place)))
                place = str(mark.parent)
            device = "cuda:0" if config.device == "cuda" else "cpu"
            common = place, mark, sources_fingerprint(), device
            task = ray.remote(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0),
                memory=int(needs.get("memory", 0)) or None,
                max_retries=0,  # Losses are counted here.
            )(on_node(__name__, make_partition.__name__))
            log.info("making %d partitions on the Ray cluster at %s", len(specs), address)
            waiting = deque(sorted(specs, key=lambda spec: -spec.bytes))
            running: dict[Any, PartitionSpec] = {}
            losses: Counter[str] = Counter()
            stack.callback(_end, running)
            while waiting or running:
                window = _window(needs, ray.cluster_resources())
                while waiting and len(running) < window:
                    spec = waiting.popleft()
                    running[task.remote(*common, spec.model_dump_json())] = spec
                done, _ = ray.wait(list(running), num_returns=len(running), timeout=POLL_SECONDS)
                for reference in done:
                    spec = running.pop(reference)
                    if _is_made(reference, spec, losses):
                        advance(spec.bytes)
                    else:
                        waiting.append(spec)


def _end(running: Mapping[Any, PartitionSpec]) -> None:
    """Cancel the tasks that are under way, and wait for their end."""
    import ray

    for reference in running:
        ray.cancel(reference)
    if running:
        ray.wait(list(running), num_returns=len(running), timeout=CANCEL_SECONDS)


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


def reserved(config: DataConfig) -> dict[str, float]:
    """What a task reserves on its node, by Ray's names."""
    needs = {"CPU": config.ray_cpus}
    if config.device == "cuda":
        needs["GPU"] = config.ray_gpus
    if config.ray_memory_gigabytes is not None:
        needs["memory"] = config.ray_memory_gigabytes * 1e9
    return needs


def check_resources(needs: Mapping[str, float], nodes: list[dict[str, Any]], address: str) -> None:
    """Raise a `UserError` that names the setting if no node ever has room for a task."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    if any(all(node.get(name, 0.0) >= need for name, need in needs.items()) for node in alive):
        return
    lacking = [name for name in needs if all(node.get(name, 0.0) < needs[name] for node in alive)]
    keys = ", ".join(KEYS[name] for name in lacking or needs)
    raise UserError(f"{keys}: no node of {address} has as much; ray status shows what they have")


def make_partition(place: str, mark: Path | None, sources: str, device: str, spec: str) -> None:
    """Make the partition of a spec, which is JSON, unless it exists.

    The other arguments are those of the job: `place` is the folder or the address of the datasets;
    `mark` a file in that folder, which a node that sees the same one sees too; `sources` the
    fingerprint of this package; `device` where to tokenise.
    """
    wanted = PartitionSpec.model_validate_json(spec)
    datasets, tokenizer = prepare(place, mark, sources, device, wanted.tokenizer)
    datasets.make(wanted, tokenizer, lambda _: None)


@functools.cache  # for the next tasks of a job
def prepare(
    place: str, mark: Path | None, sources: str, device: str, record: TokenizerRecord
) -> tuple[Datasets, Tokenizer]:
    """The datasets and the tokenizer of a job.

    Raises `UserError` unless this node runs the job's package, sees its folder and has its device.
    """
    check_sources(sources)
    if mark is not None:
        check_mark(mark, "use one that all nodes share, or an object store")
    check_device(device)
    datasets = datasets_at(place)
    datasets.remove_leftovers()
    tokenizer = datasets.tokenizers.load(record.fingerprint, record.spec, record.eos_token_id)
    return datasets, on_device(tokenizer, device)
