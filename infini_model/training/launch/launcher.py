"""Start a training in separate processes and raise its failure as one exception.

A single process runs plain `python -m infini_model.training`; several run under torchrun. On a Ray
cluster, `infini_model.training.launch.ray` starts them on its nodes. Every line they print goes to
the caller and to `<run>/logs/rank-N.log`. Nothing here knows Prefect. No process is left when
`launch` returns or is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from infini_model.training.launch.devices import GPU_NUMBERS, Gpu, log_prefix
from infini_model.training.launch.failures import ERROR_FILE, TrainingFailure, read_failure
from infini_model.training.launch.heartbeat import HangDetector
from infini_model.training.launch.recovery import read_recovery, record_failure
from infini_model.training.launch.reservation import reserve
from infini_model.training.mlflow_record import end_record

# From SIGTERM to SIGKILL: time to end the step and to write a checkpoint.
GRACE_SECONDS = 60.0
# What ending the launchers of a Ray cluster takes besides.
CLUSTER_SECONDS = 30.0
# Between two lines on the progress of copying shards.
DOWNLOAD_SECONDS = 10.0


@dataclass(frozen=True)
class Job:
    """A training to start.

    Attributes:
        run_dir: The run folder. Of several nodes the first one alone reads and writes it; the
            others need no more than a folder of their own for their logs.
        on_line: Called in this thread with every log line of every rank, `GPU<n>:` in front.
        on_progress: Called with the steps taken and the steps in all, at most twice a second and
            after the last step; on the first node only.
        stop: Polled ten times a second; what it returns is raised once a checkpoint is saved.
    """

    config: Config
    dataset_dir: Path
    run_dir: Path
    on_line: Callable[[str], None] = print
    on_progress: OnProgress = lambda _done, _total: None
    stop: Callable[[], Exception | None] = lambda: None


def launch(job: Job) -> None:
    """Train a job, or resume its run from the newest checkpoint.

    The ranks do what earlier failures of the run call for; a new one is recorded in
    `recovery.json`. On SIGTERM and Ctrl-C a checkpoint is saved first; then they act on the caller
    as usual. Waits while another training of the same output folder holds the devices. Shards that
    are in an object store are copied to this machine first.

    Raises:
        UserError: What a rank found wrong with the settings, the dataset or the run folder.
        UnreachableError: The store of the dataset stays away.
        RunLostError: Another machine has taken over the run; a checkpoint is saved here.
        DeviceError: A GPU that does not exist, or fewer GPUs than processes.
        TrainingFailure: Anything else, by its kind; `is_final` where a retry would not help.
    """
    config, run_dir = job.config, job.run_dir
    is_first = config.launch.node_rank == 0
    if is_first and (attempts := read_recovery(run_dir).attempts):
        # The training itself tells from which step, and how it divides its batch now.
        job.on_line(f"Resuming after: {attempts[-1].kind}")
    stop = job.stop
    # Or that another machine has taken over the run.
    job = replace(job, stop=lambda: stop() or lost(run_dir))
    try:
        if config.launch.launcher == "ray":
            # Its driver is a process of its own.
            _run(
                job,
                [sys.executable, "-m", "infini_model.training.launch.ray"],
                name="ray",
                other="ray.log",
                ranks={},
                environment={},
                grace_seconds=GRACE_SECONDS + CLUSTER_SECONDS,
            )
        else:
            train_here(job)
    except BaseException as error:
        # Anything else is a stop from outside: a signal, or what `stop` returned.
        is_stop = not isinstance(error, TrainingFailure | UserError)
        if isinstance(error, TrainingFailure):
            record_failure(run_dir, error, config)
            is_stop = error.kind == "preempted"
        if is_first:
            # A rank that was killed could not report its end to MLflow.
            end_record(run_dir, "KILLED" if is_stop else "FAILED")
        raise


def train_here(job: Job) -> None:
    """Train on this machine, with exactly these settings. Raises as `launch` does."""
    nodes, run_dir = job.config.launch, job.run_dir
    progress = rate_limited(
        lambda done, total: job.on_line(
            f"downloaded {done / GIGABYTE:.3g} of {total / GIGABYTE:.3g} GB of shards"
        ),
        interval_seconds=DOWNLOAD_SECONDS,
    )
    download_shards(job.dataset_dir, progress=progress, tell=job.on_line, stop=job.stop)
    with reserve(job.config, run_dir, on_line=job.on_line, stop=job.stop) as gpus:
        count = nodes.processes or max(1, len(gpus))
        first = nodes.node_rank * count
        # The ranks of this machine, each with the physical number of its GPU, or None on the CPU.
        ranks = {first + n: gpus[n].number if gpus else None for n in range(count)}
        world_size = nodes.num_nodes * count
        is_single = world_size == 1
        command = [sys.executable, "-m"]
        if not is_single:
            # Where its ranks say why they fail; the temporary folder of a machine may be full.
            said = run_dir / "logs" / f"torchrun-{nodes.node_rank}"
            shutil.rmtree(said, ignore_errors=True)
            command += ["infini_model.training.launch.torchrun", f"--log-dir={said}"]
            if nodes.num_nodes == 1:
                command += ["--standalone", "--local-addr=127.0.0.1"]
            else:
                # Static: ranks follow node_rank, so that rank 0 is on the first machine.
                command += ["--rdzv-backend=static", f"--rdzv-endpoint={nodes.rdzv_endpoint}"]
                command += [f"--nnodes={nodes.num_nodes}", f"--node-rank={nodes.node_rank}"]
            command += [f"--nproc-per-node={count}", "-m"]
        _run(
            job,
            [*command, "infini_model.training", "--report-progress"],
            name=str(nodes.node_rank),
            ranks={log_prefix(rank, gpu, world_size): rank for rank, gpu in ranks.items()},
            # Lines without a known prefix: torchrun's, or those of native code in the only rank.
            other="rank-0.log" if is_single else "torchrun.log",
            environment=_environment(gpus, count),
            watch=HangDetector(run_dir, ranks, nodes.hang_timeout_seconds),
        )


def _environment(gpus: Sequence[Gpu], count: int) -> dict[str, str]:
    """The environment variables that `count` ranks need besides the inherited ones."""
    environment = {
        "PYTHONFAULTHANDLER": "1",
        GPU_NUMBERS: ",".join(str(gpu.number) for gpu in gpus),
    }
    # The ranks share the cores; more threads or compilers than cores slow all of them down.
    cores = max(1, available_cores() // count)
    shared = {"OMP_NUM_THREADS": cores, "TORCHINDUCTOR_COMPILE_THREADS": min(32, cores)}
    environment |= {name: str(n) for name, n in shared.items() if name not in os.environ}
    if gpus:
        # Freed memory that was split for other shapes can be used again. Torch reads either name.
        if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
            environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        # NVML counts in PCI order, CUDA by default the fastest first.
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.identifier for gpu in gpus)
    return environment


def _run(
    job: Job,
    command: Sequence[str],
    *,
    name: str,
    other: str,
    ranks: Mapping[str, int],
    environment: Mapping[str, str],
    watch: Callable[[int], Exception | None] = lambda _: None,
    grace_seconds: float = GRACE_SECONDS,
) -> None:
    """Run a command with the settings, the dataset and the run of a job. Raises as `launch` does.

    Its settings, and what it says of its failure, are in files of this `name`. Lines that begin
    with one of the prefixes in `ranks` go to the file of that rank, all others to `other`.
    """
    logs = make_folder(job.run_dir / "logs")
    # Not the run's own config.yaml: this one holds what may differ between two launches.
    settings, failure = logs / f"launch-{name}.yaml", logs / f"failure-{name}.json"
    with atomic_file(settings) as temporary:
        temporary.write_text(dump_config(job.config), encoding="utf-8")
    failure.unlink(missing_ok=True)
    arguments = ["--config", settings, "--dataset", job.dataset_dir, "--run-dir", job.run_dir]
    oom_kills = processes.oom_kills()
    with contextlib.ExitStack() as stack:
        files = dict[str, IO[str]]()

        def handle(line: str) -> None:
            """Report progress; write a log line to the file of its rank, and pass it on."""
            mark, body = parse_line(line)
            if mark == PROGRESS:
                job.on_progress(*body)
                return
            rank = ranks.get(line.partition(":")[0])
            file = other if rank is None else f"rank-{rank}.log"
            if file not in files:
                # Line by line, so that `tail -f` follows.
                opened = (logs / file).open("a", encoding="utf-8", buffering=1)
                files[file] = stack.enter_context(opened)
            files[file].write(line + "\n")
            job.on_line(line)

        code = processes.run(
            [*command, *map(str, arguments)],
            on_line=handle,
            grace_seconds=grace_seconds,
            watch=watch,
            stop=job.stop,
            env={ERROR_FILE: str(failure), **environment},
        )
    if code != 0:
        by_kernel = processes.oom_kills() > oom_kills
        cause = read_failure(failure) or TrainingFailure.of_exit(code, by_kernel=by_kernel)
        raise cause.as_error()
