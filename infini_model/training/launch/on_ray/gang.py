"""A gang: one launcher on each of several nodes, in a placement group, followed to its end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infini_model.config import Config
from infini_model.runtime.errors import UserError
from infini_model.runtime.ray import marked, on_node, sources_fingerprint
from infini_model.runtime.stage_protocol import write_progress
from infini_model.training.launch.failures import Report, first_cause
from infini_model.training.launch.on_ray.node import (
    END,
    LINE,
    PROGRESS,
    Assignment,
    Launcher,
    Place,
    survey,
)

POLL_SECONDS = 0.2


class NodesLostError(Exception):
    """Nodes of a gang were lost, with what was running there; the message names them."""


@dataclass(frozen=True)
class Work:
    """What a gang trains: `config` for all of it, on folders that its nodes see."""

    config: Config
    dataset_dir: Path
    run_dir: Path

    def on(self, places: Sequence[Place], rank: int, processes: int) -> Assignment:
        """The share of the node `rank` in a gang of these places, with `processes` ranks each."""
        first = places[0]
        launch = {
            "launcher": "local",
            "nodes": None,
            "processes": processes,
            "num_nodes": len(places),
            "node_rank": rank,
            "rdzv_endpoint": f"{first.address}:{first.port}",
        }
        # All launchers must name the same run.
        assigned = self.config.updated(launch=launch, run={"name": self.run_dir.name})
        return Assignment(
            config=assigned.model_dump(mode="json"),
            dataset_dir=str(self.dataset_dir.resolve()),
            run_dir=str(self.run_dir.resolve()),
            threads=os.environ.get("OMP_NUM_THREADS"),
        )


def processes_of(needs: Mapping[str, float]) -> int:
    """The number of ranks on a node where a launcher reserves `needs`."""
    return int(needs.get("GPU", needs["CPU"]))


@contextlib.contextmanager
def reserved(needs: Mapping[str, float], count: int, seconds: float) -> Iterator[Any]:
    """A placement group of `count` nodes that have `needs` free; None if there are not so many.

    Waits at most `seconds`. At the end of the block all that runs there is ended.
    """
    from ray.util import placement_group, remove_placement_group

    group = placement_group([dict(needs)] * count, strategy="STRICT_SPREAD")
    try:
        yield group if group.wait(seconds) else None
    finally:
        remove_placement_group(group)


class _Member:
    """One node of a gang, and the launcher that runs there."""

    def __init__(self, place: Place, actor: Any, prefix: str) -> None:
        self._place, self._actor, self._prefix = place, actor, prefix
        self.report: Report | None = None

    def poll(self) -> Any:
        """Ask what has happened; returns Ray's reference to the answer."""
        return self._actor.poll.remote()

    def take(self, answer: Any) -> bool:
        """Print what an answer tells; returns whether the launcher has ended.

        Raises `NodesLostError` if there is no answer.
        """
        import ray
        from ray.exceptions import RayError

        try:
            messages = ray.get(answer)
        except RayError as error:
            raise NodesLostError(f"{self._place.host} ({_in_one_line(error)})") from error
        for kind, body in messages:
            if kind == LINE:
                print(f"{self._prefix}{body}", flush=True)
            elif kind == PROGRESS:
                write_progress(*body)
            elif kind == END:
                self.report = None if body is None else Report(**body)
                return True
        return False

    def stop(self) -> None:
        """Have it save a checkpoint and end."""
        self._actor.stop.remote()

    def kill(self) -> None:
        """End it at once; its ranks die with it."""
        import ray

        ray.kill(self._actor)


def train_in(
    group: Any, needs: Mapping[str, float], work: Work, is_stopped: Callable[[], bool]
) -> None:
    """Train on all nodes of a placement group. Once `is_stopped()`, a checkpoint is saved.

    Raises:
        NodesLostError: Nodes were lost, or the processes of their launchers.
        TrainingFailure: As `launch`; `Preempted` after a stop.
        UserError: As `launch`; also for a node that has other code or does not see the run folder.
    """
    places = _survey(group, work.run_dir)
    members = _start(group, needs, places, work)
    try:
        _follow(members, is_stopped)
    finally:
        for member in members:
            member.kill()
    cause = first_cause(member.report for member in members if member.report is not None)
    if cause is not None:
        raise cause.as_error()


def _on(group: Any, index: int) -> dict[str, Any]:
    """The options of what runs on the node of a bundle."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=index
        )
    }


def _survey(group: Any, run_dir: Path) -> list[Place]:
    """The nodes of a placement group, in the order of its bundles. Raises as `train_in` does."""
    import ray
    from ray.exceptions import RayError

    look = ray.remote(num_cpus=0, max_retries=0)(on_node(survey.__module__, survey.__name__))
    with marked(run_dir / "logs") as mark:
        asked = (sources_fingerprint(), str(mark))
        answers = [look.options(**_on(group, i)).remote(*asked) for i in range(group.bundle_count)]
        try:
            found = ray.get(answers)
        except RayError as error:
            raise NodesLostError(f"a node that was joining ({_in_one_line(error)})") from error
    for answer in found:
        if not isinstance(answer, Place):
            raise UserError(answer[1])
    return list(found)


def _start(
    group: Any, needs: Mapping[str, float], places: Sequence[Place], work: Work
) -> list[_Member]:
    """Start the launchers of a gang."""
    import ray

    made = ray.remote(num_cpus=needs["CPU"], num_gpus=needs.get("GPU", 0))(Launcher)
    processes = processes_of(needs)
    members = []
    for rank, place in enumerate(places):
        assignment = work.on(places, rank, processes)
        actor = made.options(**_on(group, rank)).remote(assignment)
        # All nodes number their GPUs from 0.
        members.append(_Member(place, actor, f"{place.host} | " if rank else ""))
    return members


def _follow(members: Sequence[_Member], is_stopped: Callable[[], bool]) -> None:
    """Return when all launchers have ended. Raises `NodesLostError` when one does not answer."""
    import ray

    asked = {member.poll(): member for member in members}
    is_told = False
    while asked:
        answers, _ = ray.wait(list(asked), num_returns=len(asked), timeout=POLL_SECONDS)
        for answer in answers:
            member = asked.pop(answer)
            if not member.take(answer):
                asked[member.poll()] = member
        if is_stopped() and not is_told:
            is_told = True
            for member in members:
                member.stop()


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
