"""One gang after another, until the training has ended: on how many nodes, and on which."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from infini_model.config import Config, LaunchConfig
from infini_model.runtime.errors import ConfigError, DeviceError, UserError
from infini_model.runtime.runs import STATE, list_checkpoints
from infini_model.training.launch.division import Division, divide
from infini_model.training.launch.failures import Crashed, Preempted
from infini_model.training.launch.on_ray.gang import (
    NodesLostError,
    Work,
    processes_of,
    reserved,
    train_in,
)

Resources = Mapping[str, float]

# For nodes that are still starting, or come back.
PATIENCE_SECONDS = 300.0
POLL_SECONDS, REPEAT_SECONDS = 1.0, 60.0
# How long to wait for nodes that others use before trying with fewer of them.
RESERVE_SECONDS = 10.0
# After so many losses without a new checkpoint, the training is the likely cause.
MOST_LOSSES = 5


def needs_of(launch: LaunchConfig, nodes: Sequence[Resources]) -> dict[str, float]:
    """What a launcher reserves on its node, by Ray's names: a GPU a process, or a CPU a process.

    Without `launch.processes` there is one process a GPU: as many as the least number of nodes
    that may train all have.
    """
    gpus = sorted((node.get("GPU", 0.0) for node in nodes), reverse=True)
    if launch.gpus == "cpu" or (launch.gpus == "auto" and not any(gpus)):
        return {"CPU": float(launch.processes or 1)}
    common = gpus[launch.node_range[0] - 1 :][:1] or [0.0]
    return {"CPU": 1.0, "GPU": float(launch.processes or max(1, int(common[0])))}


class Gangs:
    """The gangs of one training, on the cluster at `address`, which this process has joined."""

    def __init__(
        self,
        config: Config,
        dataset_dir: Path,
        run_dir: Path,
        address: str,
        is_stopped: Callable[[], bool],
    ) -> None:
        """`is_stopped` tells whether the training is to save a checkpoint and end."""
        self._config, self._dataset_dir, self._run_dir = config, dataset_dir, run_dir
        self._address, self._is_stopped = address, is_stopped
        # A gang that replaces another takes its steps, whatever its size.
        self._global_batch = self._saved_batch()

    def train(self) -> None:
        """Train until the last step, on another gang whenever nodes are lost.

        Raises:
            TrainingFailure: As `train_in`; also `Crashed` when nodes are lost time and again.
            UserError: As `train_in`.
            DeviceError: The cluster has too few nodes, none of a number that divides the run's
                global batch, or no GPU where one is asked for.
        """
        losses, saved = 0, self._saved_step()
        while True:
            try:
                self._train_once()
            except NodesLostError as lost:
                self._end_if_stopped()
                before, saved = saved, self._saved_step()
                losses = losses + 1 if saved == before else 1
                if losses == MOST_LOSSES:
                    message = f"lost {lost}, for the {losses}th time since step {saved}"
                    raise Crashed(message) from lost
                print(f"Lost {lost}; resuming from step {saved} with a new gang", flush=True)
            else:
                return

    def _train_once(self) -> None:
        with self._nodes() as (group, needs):
            if "GPU" in needs:
                # `auto` chooses once: a gang that replaces another does not go on without them.
                self._config = self._config.updated(launch={"gpus": "all"})
            division = self._divided(group.bundle_count, needs)
            self._global_batch = division.global_batch
            config = division.applied_to(self._config)
            work = Work(config, self._dataset_dir, self._run_dir)
            train_in(group, needs, work, self._is_stopped)

    @contextlib.contextmanager
    def _nodes(self) -> Iterator[tuple[Any, Resources]]:
        """Reserve as many nodes as there are in the range; yields them, and what of each.

        Waits for nodes that others use; for nodes that there are not, `PATIENCE_SECONDS`.
        """
        deadline, next_line = time.monotonic() + PATIENCE_SECONDS, 0.0
        while True:
            nodes = _alive()
            needs = needs_of(self._config.launch, nodes)
            able = sum(all(node.get(key, 0.0) >= needs[key] for key in needs) for node in nodes)
            sizes = self._sizes(able, needs)
            for count in sizes:
                with reserved(needs, count, RESERVE_SECONDS) as group:
                    if group is not None:
                        yield group, needs
                        return
                self._end_if_stopped()
            shortage = self._shortage(able, needs)
            if not sizes and time.monotonic() > deadline:
                raise shortage
            if time.monotonic() > next_line:
                next_line = time.monotonic() + REPEAT_SECONDS
                in_use = ", in use by others" if sizes else ""
                print(f"Waiting for nodes: {shortage}{in_use}", flush=True)
            self._end_if_stopped()
            time.sleep(POLL_SECONDS)

    def _sizes(self, able: int, needs: Resources) -> list[int]:
        """The numbers of nodes to try, of those that are able, the largest first.

        All of them divide the run's global batch.
        """
        least, most = self._config.launch.node_range
        sizes = []
        for count in range(min(most, able), least - 1, -1):
            with contextlib.suppress(ConfigError):
                self._divided(count, needs)
                sizes.append(count)
        return sizes

    def _divided(self, count: int, needs: Resources) -> Division:
        """How `count` nodes split the run's global batch, which the first gang fixes."""
        processes = count * processes_of(needs)
        return divide(self._config.training, processes, self._global_batch)

    def _shortage(self, able: int, needs: Resources) -> UserError:
        """Why no gang can be formed of the nodes that are able."""
        launch = self._config.launch
        least, most = launch.node_range
        if "GPU" in needs and not any(node.get("GPU") for node in _alive()):
            where = f"no node of the Ray cluster at {self._address} has a GPU"
            return DeviceError(f"launch.gpus: got {launch.gpus!r}: {where}")
        wanted = " and ".join(f"{need:g} {name}" for name, need in needs.items())
        found = f"the Ray cluster at {self._address} has {able} with {wanted} each"
        if able >= least and not self._sizes(able, needs):
            counts = str(least) if least in (most, able) else f"{least} to {min(most, able)}"
            found += (
                f"; {counts} x {processes_of(needs)} processes cannot split the global batch "
                f"of {self._global_batch} windows"
            )
        return DeviceError(f"launch.nodes: got {launch.nodes or 1}: {found}")

    def _end_if_stopped(self) -> None:
        if self._is_stopped():
            raise Preempted(f"stopped; step {self._saved_step()} is saved")

    def _saved_step(self) -> int:
        return next((step for step, _ in list_checkpoints(self._run_dir)), 0)

    def _saved_batch(self) -> int | None:
        """The global batch of the newest checkpoint; None without one."""
        for _, folder in list_checkpoints(self._run_dir):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                state = json.loads((folder / STATE).read_text(encoding="utf-8"))
                return int(state["global_batch"])
        return None


def _alive() -> list[Resources]:
    """The resources of each node of the cluster."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
