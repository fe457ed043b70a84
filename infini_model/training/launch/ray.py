"""`python -m infini_model.training.launch.ray`: the driver of a training on a Ray cluster.

It forms a gang: a placement group of nodes, with one actor a node that runs torchrun there, as on
several machines. When nodes are lost, the next gang, of the nodes that there are, resumes from the
newest checkpoint; any other failure ends the driver, for the caller to retry. Ray ends what runs on
the nodes when the driver dies.

Ray Train would count workers instead of nodes, and runs its function in a thread, where no handler
of a signal can be set: a rank could not save a checkpoint first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infini_model.config import Config, LaunchConfig, load_config
from infini_model.runtime import ray as cluster
from infini_model.runtime.branches import is_of_parent
from infini_model.runtime.errors import DeviceError, UserError
from infini_model.runtime.processes import deferred_signals
from infini_model.runtime.runs import STATE, list_checkpoints
from infini_model.runtime.stage_protocol import PROGRESS
from infini_model.training.launch.failures import TrainingFailure, first_cause
from infini_model.training.launch.launcher import Job, train_here
from infini_model.training.launch.recovery import BatchPlan

Resources = Mapping[str, float]

# For nodes that are still starting, or come back.
PATIENCE_SECONDS = 300.0
POLL_SECONDS, REPEAT_SECONDS = 1.0, 60.0
# How long to wait for nodes that others use before trying with fewer of them.
RESERVE_SECONDS = 10.0
# How long the driver and a node wait for the other's next message.
MESSAGE_SECONDS = 0.2
# After so many losses without a new checkpoint, the training is the likely cause.
MOST_LOSSES = 5
# What a node says: lines, also of progress, and at last None or why it failed.
Said = str | TrainingFailure | None


class NodeLostError(Exception):
    """A node of a gang was lost, with what was running there; `error` is what Ray raised."""

    def __init__(self, node: str, error: Exception) -> None:
        first_line = str(error).strip().partition("\n")[0]
        super().__init__(f"{node} ({type(error).__name__}: {first_line})")


@dataclass(frozen=True)
class Node:
    """A node of a gang: its name, its address, and a port that is free there."""

    host: str
    address: str
    port: int


def probe_node(sources: str, mark: str) -> Node:
    """This node, once it is known to run the same code and to see the run folder.

    `sources` is the fingerprint of this package, `mark` a file in the run folder. Raises as
    `check_sources` and `check_mark` do.
    """
    from ray.util import get_node_ip_address

    cluster.check_sources(sources)
    cluster.check_mark(Path(mark), "run.output_dir must be a folder that all nodes share")
    with socket.create_server(("", 0)) as free:
        return Node(socket.gethostname(), get_node_ip_address(), free.getsockname()[1])


class NodeLauncher:
    """The launcher on a node. A thread works; the methods, Ray's calls, return at once."""

    def __init__(
        self, config: dict[str, Any], dataset_dir: Path, run_dir: Path, threads: str | None
    ) -> None:
        """`config` are settings as JSON; `threads` is the driver's OMP_NUM_THREADS."""
        # Ray's number of threads is meant for its own workers; a node's launcher has ranks.
        os.environ.pop("OMP_NUM_THREADS", None)
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads
        self._messages: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self._stopped = threading.Event()
        arguments = config, dataset_dir, run_dir
        threading.Thread(target=self._train, args=arguments, name="launcher", daemon=True).start()

    def _train(self, config: dict[str, Any], dataset_dir: Path, run_dir: Path) -> None:
        failure = None
        try:
            job = Job(
                load_config(overrides=[config]),
                dataset_dir,
                run_dir,
                on_line=self._messages.put,
                on_progress=lambda n, total: self._messages.put(f"{PROGRESS} [{n}, {total}]"),
                stop=self._why_stopped,
            )
            train_here(job)
        except Exception as error:  # noqa: BLE001 - the driver raises it
            failure = TrainingFailure.of(error)
        self._messages.put(failure)

    def _why_stopped(self) -> TrainingFailure | None:
        # Made anew: of several failures the first one is the cause.
        return TrainingFailure("preempted", "stopped") if self._stopped.is_set() else None

    def poll(self) -> list[Said]:
        """What has been said since the last call."""
        try:
            messages = [self._messages.get(timeout=MESSAGE_SECONDS)]
        except queue.Empty:
            return []
        while not self._messages.empty():
            messages.append(self._messages.get())
        return messages

    def stop(self) -> None:
        """Have the ranks save a checkpoint and end."""
        self._stopped.set()


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


def _ranks_of(needs: Resources) -> int:
    """The number of ranks on a node where a launcher reserves `needs`."""
    return int(needs.get("GPU", needs["CPU"]))


@dataclass
class RayLauncher:
    """A training on the cluster at `address`, which this process has joined.

    `is_stopped` tells whether the training is to save a checkpoint and end.
    """

    config: Config
    dataset_dir: Path
    run_dir: Path
    address: str
    is_stopped: Callable[[], bool]

    def __post_init__(self) -> None:
        self.dataset_dir, self.run_dir = self.dataset_dir.resolve(), self.run_dir.resolve()
        # A gang that replaces another takes its steps, whatever its size.
        self.global_batch = _saved_batch(self.run_dir, self.config)

    def train(self) -> None:
        """Train until the last step, on another gang whenever nodes are lost.

        Raises:
            TrainingFailure: As `launch`; also when nodes are lost time and again.
            UserError: As `launch`; also for a node that has other code or does not see the run
                folder.
            DeviceError: The cluster has too few nodes, none of a number that divides the run's
                global batch, or no GPU where one is asked for.
        """
        losses, saved = 0, _saved_step(self.run_dir)
        while True:
            try:
                with self._reserved() as (group, needs):
                    self._train_on(group, needs)
            except NodeLostError as lost:
                self._end_if_stopped()
                before, saved = saved, _saved_step(self.run_dir)
                losses = losses + 1 if saved == before else 1
                if losses == MOST_LOSSES:
                    message = f"lost {lost}, for the {losses}th time since step {saved}"
                    raise TrainingFailure("crash", message) from lost
                print(f"Lost {lost}; resuming from step {saved} with a new gang", flush=True)
            else:
                return

    def _end_if_stopped(self) -> None:
        if self.is_stopped():
            message = f"stopped; step {_saved_step(self.run_dir)} is saved"
            raise TrainingFailure("preempted", message)

    @contextlib.contextmanager
    def _reserved(self) -> Iterator[tuple[Any, Resources]]:
        """Reserve as many nodes as there are in the range; yields them, and what of each.

        Waits for nodes that others use; for nodes that there are not, `PATIENCE_SECONDS`. At the
        end of the block all that runs there is ended.
        """
        import ray
        from ray.util import placement_group, remove_placement_group

        deadline, next_line = time.monotonic() + PATIENCE_SECONDS, 0.0
        least, most = self.config.launch.node_range
        while True:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            needs = needs_of(self.config.launch, nodes)
            able = sum(all(node.get(key, 0.0) >= needs[key] for key in needs) for node in nodes)
            counts = range(min(most, able), least - 1, -1)
            # Any number of nodes divides the 0 of a run that has not begun.
            batch, ranks = self.global_batch or 0, _ranks_of(needs)
            sizes = [count for count in counts if batch % (count * ranks) == 0]
            for count in sizes:
                group = placement_group([needs] * count, strategy="STRICT_SPREAD")
                try:
                    if group.wait(RESERVE_SECONDS):
                        yield group, needs
                        return
                finally:
                    remove_placement_group(group)
                self._end_if_stopped()
            shortage = self._shortage(nodes, needs, able)
            if not sizes and time.monotonic() > deadline:
                raise DeviceError(shortage)
            if time.monotonic() > next_line:
                next_line = time.monotonic() + REPEAT_SECONDS
                in_use = ", in use by others" if sizes else ""
                print(f"Waiting for nodes: {shortage}{in_use}", flush=True)
            self._end_if_stopped()
            time.sleep(POLL_SECONDS)

    def _shortage(self, nodes: Sequence[Resources], needs: Resources, able: int) -> str:
        """Explain that no gang can be formed of the nodes that are able."""
        launch, where = self.config.launch, f"the Ray cluster at {self.address}"
        if "GPU" in needs and not any(node.get("GPU") for node in nodes):
            return f"launch.gpus: got {launch.gpus!r}: no node of {where} has a GPU"
        wanted = " and ".join(f"{need:g} {name}" for name, need in needs.items())
        found = f"{where} has {able} with {wanted} each"
        if self.global_batch is not None:
            found += f"; all processes must divide the global batch of {self.global_batch} windows"
        return f"launch.nodes: got {launch.nodes or 1}: {found}"

    def _train_on(self, group: Any, needs: Resources) -> None:
        """Train on all nodes of a placement group; once `is_stopped()`, a checkpoint is saved.

        Raises `NodeLostError`, and as `train` does.
        """
        import ray

        if "GPU" in needs:
            # `auto` chooses once: a gang that replaces another does not go on without them.
            self.config = self.config.updated(launch={"gpus": "all"})
        ranks = _ranks_of(needs)
        plan = BatchPlan.of(self.config.training, group.bundle_count * ranks, self.global_batch)
        self.global_batch = plan.global_batch
        nodes = self._probe(group)
        shared = {
            "launcher": "local",
            "nodes": None,
            "processes": ranks,
            "num_nodes": len(nodes),
            "rdzv_endpoint": f"{nodes[0].address}:{nodes[0].port}",
        }
        made = ray.remote(num_cpus=needs["CPU"], num_gpus=needs.get("GPU", 0))(NodeLauncher)
        launchers = []
        for rank in range(len(nodes)):
            # All launchers must name the same run.
            config = plan.applied_to(self.config).updated(
                launch=shared | {"node_rank": rank}, run={"name": self.run_dir.name}
            )
            arguments = config.model_dump(mode="json"), self.dataset_dir, self.run_dir
            placed = made.options(**_on(group, rank))
            launchers.append(placed.remote(*arguments, os.environ.get("OMP_NUM_THREADS")))
        try:
            cause = first_cause(self._follow(nodes, launchers))
        finally:
            for launcher in launchers:
                ray.kill(launcher)  # its ranks die with it
        if cause is not None:
            raise cause.as_error()

    def _probe(self, group: Any) -> list[Node]:
        """The nodes of a placement group, in the order of its bundles. Raises as `_train_on`."""
        import ray
        from ray.exceptions import RayError

        task = ray.remote(num_cpus=0, max_retries=0)(cluster.on_node(__name__, probe_node.__name__))
        with cluster.marked(self.run_dir / "logs") as mark:
            asked = cluster.sources_fingerprint(), str(mark)
            places = range(group.bundle_count)
            try:
                found = ray.get([task.options(**_on(group, i)).remote(*asked) for i in places])
            except RayError as error:
                raise NodeLostError("a node that was joining", error) from error
        for answer in found:
            if not isinstance(answer, Node):
                raise UserError(answer[1])
        return list(found)

    def _follow(self, nodes: Sequence[Node], launchers: Sequence[Any]) -> list[TrainingFailure]:
        """Print what the launchers say until all have ended; returns what those say that failed.

        Raises `NodeLostError` when one does not answer.
        """
        import ray
        from ray.exceptions import RayError

        asked = {launcher.poll.remote(): rank for rank, launcher in enumerate(launchers)}
        failures, is_told = list[TrainingFailure](), False
        while asked:
            answers, _ = ray.wait([*asked], num_returns=len(asked), timeout=MESSAGE_SECONDS)
            for answer in answers:
                rank = asked.pop(answer)
                try:
                    messages = ray.get(answer)
                except RayError as error:
                    raise NodeLostError(nodes[rank].host, error) from error
                for said in messages:
                    if isinstance(said, str):
                        # All nodes number their GPUs from 0.
                        print(f"{nodes[rank].host} | {said}" if rank else said, flush=True)
                    elif said is not None:
                        failures.append(said)
                if not messages or isinstance(messages[-1], str):
                    asked[launchers[rank].poll.remote()] = rank
            if self.is_stopped() and not is_told:
                is_told = True
                for launcher in launchers:
                    launcher.stop.remote()
        return failures


def _saved_step(run_dir: Path) -> int:
    return next((step for step, _ in list_checkpoints(run_dir)), 0)


def _saved_batch(run_dir: Path, config: Config) -> int | None:
    """The global batch of the newest checkpoint; None without one of this run."""
    for _, folder in list_checkpoints(run_dir):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            state = json.loads((folder / STATE).read_text(encoding="utf-8"))
            return None if is_of_parent(state["config"], config) else int(state["global_batch"])
    return None


def _on(group: Any, index: int) -> dict[str, Any]:
    """The options of what runs on the node of a bundle."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    return {"scheduling_strategy": strategy}


def main() -> int:
    """Train; a failure is saved for the launcher. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m infini_model.training.launch.ray")
    for name in ("--config", "--dataset", "--run-dir"):
        parser.add_argument(name, type=Path, required=True)
    arguments = parser.parse_args()
    config = load_config(file=arguments.config)
    try:
        # Ray installs a handler of its own when it joins.
        with (
            cluster.connect("launch.launcher") as address,
            deferred_signals() as received,
        ):
            folders = arguments.dataset, arguments.run_dir
            RayLauncher(config, *folders, address, lambda: bool(received)).train()
    except (UserError, ConnectionError, TrainingFailure) as error:
        failure = TrainingFailure.of(error)
        failure.save()
        return failure.exit_status
    return 0


if __name__ == "__main__":
    # Ray sends what is defined in `__main__` by value: it would not be known again.
    from infini_model.training.launch import ray as module

    sys.exit(module.main())
