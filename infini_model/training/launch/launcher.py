"""Start a training in separate processes and raise its failure as one typed exception.

A single process runs plain `python -m infini_model.training`; several run under torchrun. On a Ray
cluster, `infini_model.training.launch.on_ray` starts them on its nodes. Every line they print goes
to the caller and to `<run>/logs/rank-N.log`. Nothing here knows Prefect. No process is left when
`launch` returns or is killed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from infini_model.config import Config, dump_config
from infini_model.data.downloads import GIGABYTE, download_shards
from infini_model.runtime import processes
from infini_model.runtime.errors import UserError
from infini_model.runtime.machine import available_cores
from infini_model.runtime.owner import lost
from infini_model.runtime.stage_protocol import PROGRESS, OnProgress, parse_line, rate_limited
from infini_model.runtime.storage import atomic_file, make_folder
from infini_model.training.launch import failures
from infini_model.training.launch.devices import GPU_NUMBERS, Gpu, gpu_numbers
from infini_model.training.launch.heartbeat import Watch
from infini_model.training.launch.recovery import read_recovery, record_failure
from infini_model.training.launch.reservation import reserve
from infini_model.training.mlflow_record import end_record

# From SIGTERM to SIGKILL: time to end the step and to write a checkpoint.
GRACE_SECONDS = 60.0
# What ending the launchers of a Ray cluster takes besides.
CLUSTER_SECONDS = 30.0
# Between two lines on the progress of copying shards.
DOWNLOAD_SECONDS = 10.0
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
    """Train `config` on a dataset folder in `run_dir`, or resume from its newest checkpoint.

    The ranks do what earlier failures of the run call for; a new one is recorded in
    `recovery.json`. On SIGTERM and Ctrl-C a checkpoint is saved first; then they act on the caller
    as usual. Waits while another training of the same output folder holds the devices. Shards that
    are in an object store are copied to this machine first.

    Args:
        config: The whole configuration.
        dataset_dir: A finished dataset folder.
        run_dir: The run folder. Of several nodes the first one alone reads and writes it; the
            others need no more than a folder of their own for their logs.
        timeout_seconds: After this long the training saves a checkpoint and ends.
        on_line: Called in this thread with every log line of every rank, `GPU<n>:` in front.
        on_progress: Called with the steps taken and the steps in all, at most twice a second and
            after the last step; on the first node only.
        stop: Polled ten times a second; what it returns is raised once a checkpoint is saved.

    Raises:
        UserError: What a rank found wrong with the settings, the dataset or the run folder.
        UnreachableError: The store of the dataset stays away.
        RunLostError: Another machine has taken over the run; a checkpoint is saved here.
        DeviceError: A GPU that does not exist, or fewer GPUs than processes.
        TrainingFailure: Anything else, by its type; `is_final` where a retry would not help.
    """

    def or_lost() -> Exception | None:
        """What `stop` returns, or that another machine has taken over the run."""
        return stop() or lost(run_dir)

    is_first = config.launch.node_rank == 0
    if is_first and (change := read_recovery(run_dir).describe(config)):
        on_line(change)
    train = _train_on_ray if config.launch.launcher == "ray" else train_here
    try:
        train(
            config,
            dataset_dir,
            run_dir,
            timeout_seconds=timeout_seconds,
            on_line=on_line,
            on_progress=on_progress,
            stop=or_lost,
        )
    except BaseException as error:
        if isinstance(error, failures.TrainingFailure):
            record_failure(run_dir, error, config)
        # A rank that was killed could not report its end to MLflow.
        stopped = isinstance(error, failures.Preempted) or not isinstance(error, FAILED)
        if is_first:
            end_record(run_dir, "KILLED" if stopped else "FAILED")
        raise


def train_here(
    config: Config,
    dataset_dir: Path,
    run_dir: Path,
    *,
    timeout_seconds: float | None,
    on_line: Callable[[str], None],
    on_progress: OnProgress,
    stop: Callable[[], Exception | None],
) -> None:
    """Train on this machine, with exactly these settings. Arguments and errors are `launch`'s."""
    told = rate_limited(
        lambda done, total: on_line(
            f"downloaded {done / GIGABYTE:.3g} of {total / GIGABYTE:.3g} GB of shards"
        ),
        interval_seconds=DOWNLOAD_SECONDS,
    )
    download_shards(dataset_dir, progress=told, tell=on_line, stop=stop)
    with reserve(config, run_dir, on_line=on_line, stop=stop) as gpus:
        ranks = _LocalRanks.of(config, gpus)
        # Lines without a known prefix: torchrun's, or those of native code in the only rank.
        other = "rank-0.log" if ranks.is_single else "torchrun.log"
        try:
            with _Output(run_dir, ranks.by_prefix(), other, on_line, on_progress) as output:
                _run(
                    [*_command(config, ranks, run_dir), "--report-progress"],
                    *(config, dataset_dir, run_dir, timeout_seconds),
                    on_line=output.handle,
                    stop=stop,
                    watch=Watch(run_dir, ranks.numbers, config.launch.hang_timeout_seconds),
                    environment=_environment(ranks),
                )
        except failures.Hung as hung:
            if hung.rank is not None:
                hung.gpu = ranks.physical_gpus().get(hung.rank)
            raise


def _train_on_ray(
    config: Config,
    dataset_dir: Path,
    run_dir: Path,
    *,
    timeout_seconds: float | None,
    on_line: Callable[[str], None],
    on_progress: OnProgress,
    stop: Callable[[], Exception | None],
) -> None:
    """Train on the nodes of a Ray cluster, started by a driver in a process of its own.

    Arguments and errors are those of `launch`.
    """
    with _Output(run_dir, {}, "ray.log", on_line, on_progress) as output:
        _run(
            [sys.executable, "-m", "infini_model.training.launch.on_ray"],
            *(config, dataset_dir, run_dir, timeout_seconds),
            on_line=output.handle,
            stop=stop,
            environment=_same_package(),
            grace_seconds=GRACE_SECONDS + CLUSTER_SECONDS,
        )


@dataclass(frozen=True)
class _LocalRanks:
    """The ranks that run on this machine.

    Attributes:
        numbers: Their ranks among all.
        gpus: Their GPUs, in the same order; empty on the CPU.
        are_all: Whether no other machine takes part.
    """

    numbers: range
    gpus: Sequence[Gpu]
    are_all: bool

    @classmethod
    def of(cls, config: Config, gpus: Sequence[Gpu]) -> _LocalRanks:
        nodes = config.launch
        count = nodes.processes or max(1, len(gpus))
        first = nodes.node_rank * count
        return cls(range(first, first + count), gpus, nodes.num_nodes == 1)

    @property
    def is_single(self) -> bool:
        """Whether there is one process in all."""
        return self.are_all and len(self.numbers) == 1

    def physical_gpus(self) -> dict[int, int]:
        """The physical number of each rank's GPU; empty on the CPU."""
        return dict(zip(self.numbers, (gpu.number for gpu in self.gpus), strict=False))

    def by_prefix(self) -> dict[str, int]:
        """The rank behind each `GPU<n>` that begins a line."""
        physical = self.physical_gpus()
        return {f"GPU{physical.get(rank, rank)}": rank for rank in self.numbers}


def _run(
    command: Sequence[str],
    config: Config,
    dataset_dir: Path,
    run_dir: Path,
    timeout_seconds: float | None,
    *,
    on_line: Callable[[str], None],
    stop: Callable[[], Exception | None],
    environment: Mapping[str, str],
    watch: Callable[[int], Exception | None] = lambda _: None,
    grace_seconds: float = GRACE_SECONDS,
) -> None:
    """Run a command with these settings, this dataset and this run. Raises as `launch` does."""
    # Not the run's own config.yaml: this one holds what may differ between two launches.
    settings = run_dir / "logs" / f"launch-{config.launch.node_rank}.yaml"
    with atomic_file(settings) as temporary:
        temporary.write_text(dump_config(config), encoding="utf-8")
    failures.clear(run_dir)
    arguments = ["--config", settings, "--dataset", dataset_dir, "--run-dir", run_dir]
    oom_kills = processes.oom_kills()
    try:
        code = processes.run(
            [*command, *map(str, arguments)],
            on_line=on_line,
            timeout_seconds=timeout_seconds,
            grace_seconds=grace_seconds,
            watch=watch,
            stop=stop,
            env=environment,
        )
    except processes.ProcessTimeoutError as error:
        raise failures.TimedOut(f"not finished after {timeout_seconds:g} s") from error
    if code != 0:
        by_kernel = processes.oom_kills() > oom_kills
        raise failures.explain(run_dir, code, by_kernel=by_kernel)


def _environment(ranks: _LocalRanks) -> dict[str, str]:
    """The environment variables that the ranks need besides the inherited ones."""
    environment = _same_package()
    environment |= {"PYTHONFAULTHANDLER": "1", GPU_NUMBERS: gpu_numbers(ranks.gpus)}
    # The ranks share the cores; more threads or compilers than cores slow all of them down.
    cores = max(1, available_cores() // len(ranks.numbers))
    shared = {"OMP_NUM_THREADS": cores, "TORCHINDUCTOR_COMPILE_THREADS": min(32, cores)}
    environment |= {name: str(n) for name, n in shared.items() if name not in os.environ}
    if ranks.gpus:
        # Freed memory that was split for other shapes can be used again. Torch reads either name.
        if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
            environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        # NVML counts in PCI order, CUDA by default the fastest first.
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.identifier for gpu in ranks.gpus)
    return environment


def _same_package() -> dict[str, str]:
    """The variable by which a child imports this package, whatever its working directory is."""
    package_root = str(Path(__file__).resolve().parents[3])
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [package_root, inherited]))}


def _command(config: Config, ranks: _LocalRanks, run_dir: Path) -> list[str]:
    """The program that trains, without its arguments."""
    if ranks.is_single:
        return [sys.executable, "-m", "infini_model.training"]
    nodes = config.launch
    if ranks.are_all:
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
        f"--nproc-per-node={len(ranks.numbers)}",
        *["-m", "infini_model.training"],
    ]


class _Output:
    """Reports progress; writes each log line to its rank's file and passes it to the caller."""

    def __init__(
        self,
        run_dir: Path,
        ranks: Mapping[str, int],
        other: str,
        on_line: Callable[[str], None],
        on_progress: OnProgress,
    ) -> None:
        """`ranks` are those behind prefixes of lines; all other lines go to the file `other`."""
        self._folder = make_folder(run_dir / "logs")
        self._on_line, self._on_progress = on_line, on_progress
        self._ranks, self._other = ranks, other
        self._files: dict[str, IO[str]] = {}

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, _kind: object, error: object, _traceback: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, FAILED):
            self.handle(f"The training was stopped: {error}")
        for file in self._files.values():
            file.close()

    def handle(self, line: str) -> None:
        """Pass on one line that a process printed."""
        if (message := parse_line(line)) and message.mark == PROGRESS:
            self._on_progress(*message.body)
            return
        rank = self._ranks.get(line.partition(":")[0])
        name = self._other if rank is None else f"rank-{rank}.log"
        if name not in self._files:
            # Line by line, so that `tail -f` follows.
            self._files[name] = (self._folder / name).open("a", encoding="utf-8", buffering=1)
        self._files[name].write(line + "\n")
        self._on_line(line)
