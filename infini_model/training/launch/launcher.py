"""Start a training in processes of its own, and come back with its end as one typed failure.

One process is plain `python -m infini_model.training`; several are torchrun's. Every line they
print goes to the caller and to `<run>/logs/rank-N.log`. Nothing here knows Prefect, and nothing of
the process tree is left when `launch` returns or is killed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from infini_model.config import Config, dump_config
from infini_model.runtime import processes
from infini_model.runtime.errors import UserError
from infini_model.runtime.stage_protocol import PROGRESS, OnProgress, parse_line
from infini_model.runtime.storage import atomic_file, make_folder
from infini_model.training.callbacks.heartbeat import Watch
from infini_model.training.callbacks.mlflow_record import end_record
from infini_model.training.launch import failures
from infini_model.training.launch.devices import Gpu
from infini_model.training.launch.recovery import learn, read_recovery
from infini_model.training.launch.reservation import reserve

# For a step to end and a checkpoint to be written after SIGTERM, before SIGKILL.
GRACE_SECONDS = 60.0
PREFIX = re.compile(r"GPU(\d+):")
# Anything else that ends a launch is a stop from outside: a signal, or what `stop` returned.
FAILED = (failures.TrainingFailure, UserError)


def launch(
    config: Config,
    dataset_dir: Path,
    run_dir: Path,
    *,
    timeout_seconds: float | None = None,
    on_line: Callable[[str], None] = print,
    on_progress: OnProgress = lambda _done, _total: None,
    stop: Callable[[], Exception | None] = lambda: None,
) -> None:
    """Train `config` on a dataset folder in `run_dir`, or go on from its newest checkpoint.

    What earlier failures of the run have taught is applied, and what a new one teaches is kept
    (`recovery.json`). SIGTERM and Ctrl-C have a checkpoint written first; then they act on the
    caller as ever. While another training of the same output folder holds the devices, it waits.

    Args:
        config: The whole configuration.
        dataset_dir: A finished dataset folder.
        run_dir: The run folder; every node of a training on several sees the same one.
        timeout_seconds: After this long the training is told to save and end.
        on_line: Gets every line that any rank prints, `GPU<rank>:` in front, in this thread.
        on_progress: Gets the steps taken and the steps in all, at most twice a second and after the
            last step; on the first node only.
        stop: Asked ten times a second; what it returns is raised once a checkpoint is saved.

    Raises:
        UserError: What a rank found wrong with the settings, the dataset or the run folder.
        DeviceError: A GPU that does not exist, or fewer GPUs than processes.
        TrainingFailure: Anything else, by its type; `is_final` where a retry would not help.
    """
    recovery = read_recovery(run_dir)
    if change := recovery.describe(config):
        on_line(change)
    try:
        with reserve(config, run_dir, on_line=on_line, stop=stop) as gpus:
            settings = recovery.applied_to(config)
            _run(settings, gpus, dataset_dir, run_dir, timeout_seconds, on_line, on_progress, stop)
    except BaseException as error:
        if isinstance(error, failures.TrainingFailure):
            learn(run_dir, error, config)
        # A rank that was killed could not report its end to MLflow.
        stopped = isinstance(error, failures.Preempted) or not isinstance(error, FAILED)
        end_record(run_dir, "KILLED" if stopped else "FAILED")
        raise


def _run(
    config: Config,
    gpus: list[Gpu],
    dataset_dir: Path,
    run_dir: Path,
    timeout_seconds: float | None,
    on_line: Callable[[str], None],
    on_progress: OnProgress,
    stop: Callable[[], Exception | None],
) -> None:
    """Train with exactly these settings on these GPUs. Raises as `launch` does."""
    count = config.launch.processes or max(1, len(gpus))
    environment = _environment([gpu.identifier for gpu in gpus], count)
    logs = make_folder(run_dir / "logs")
    # Apart from the run's own config.yaml: what may change between two launches is in here.
    settings = logs / f"launch-{config.launch.node_rank}.yaml"
    with atomic_file(settings) as temporary:
        temporary.write_text(dump_config(config), encoding="utf-8")
    failures.clear(run_dir)
    arguments = ["--config", settings, "--dataset", dataset_dir, "--run-dir", run_dir]
    command = [*_command(config, count, run_dir), *map(str, arguments), "--report-progress"]
    only = 0 if count * config.launch.num_nodes == 1 else None
    first = config.launch.node_rank * count
    watch = Watch(run_dir, range(first, first + count), config.launch.hang_timeout_seconds)
    oom_kills = processes.oom_kills()
    with _Output(logs, only, on_line, on_progress) as output:
        try:
            code = processes.run(
                command,
                on_line=output.handle,
                timeout_seconds=timeout_seconds,
                grace_seconds=GRACE_SECONDS,
                watch=watch,
                stop=stop,
                env=environment,
            )
        except processes.ProcessTimeoutError as error:
            raise failures.TimedOut(f"not done after {timeout_seconds:g} s") from error
    if code != 0:
        by_kernel = processes.oom_kills() > oom_kills
        raise failures.explain(run_dir, code, by_kernel=by_kernel)


def _environment(devices: list[str], count: int) -> dict[str, str]:
    """What the ranks need to know besides what is set already."""
    environment: dict[str, str] = {"PYTHONFAULTHANDLER": "1"}
    if "OMP_NUM_THREADS" not in os.environ:
        # The ranks share the cores; more threads than cores make every one of them slower.
        environment["OMP_NUM_THREADS"] = str(max(1, _cores() // count))
    if devices:
        # NVML counts in PCI order, CUDA by default the fastest first.
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    # The ranks import the package that this process did, from wherever they are started.
    package_root = str(Path(__file__).resolve().parents[3])
    inherited = os.environ.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, inherited]))
    return environment


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _command(config: Config, count: int, run_dir: Path) -> list[str]:
    """The program that trains, without its arguments."""
    nodes = config.launch
    if count == 1 and nodes.num_nodes == 1:
        return [sys.executable, "-m", "infini_model.training"]
    if nodes.num_nodes == 1:
        where = ["--standalone", "--local-addr=127.0.0.1"]
    else:
        where = [
            f"--nnodes={nodes.num_nodes}",
            f"--node-rank={nodes.node_rank}",
            # Static: ranks follow node_rank, so that rank 0 is on the first machine.
            "--rdzv-backend=static",
            f"--rdzv-endpoint={nodes.rdzv_endpoint}",
        ]
    return [
        *[sys.executable, "-m", "infini_model.training.launch.agent", str(run_dir)],
        *where,
        f"--nproc-per-node={count}",
        *["-m", "infini_model.training"],
    ]


class _Output:
    """Reports progress; writes each log line to its rank's file and passes it to the caller."""

    def __init__(
        self,
        folder: Path,
        only: int | None,
        on_line: Callable[[str], None],
        on_progress: OnProgress,
    ) -> None:
        self._folder = folder
        self._on_line, self._on_progress = on_line, on_progress
        # What bears no rank's prefix: torchrun itself, or native code of the only rank.
        self._rest = "torchrun.log" if only is None else f"rank-{only}.log"
        self._files: dict[str, IO[str]] = {}

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.close()

    def handle(self, line: str) -> None:
        """Pass on one line that was printed."""
        if (message := parse_line(line)) and message.mark == PROGRESS:
            self._on_progress(*message.body)
            return
        prefix = PREFIX.match(line)
        name = f"rank-{prefix[1]}.log" if prefix else self._rest
        if name not in self._files:
            # Line by line, so that `tail -f` follows.
            self._files[name] = (self._folder / name).open("a", encoding="utf-8", buffering=1)
        self._files[name].write(line + "\n")
        self._on_line(line)
