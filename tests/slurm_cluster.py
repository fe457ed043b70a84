"""A Slurm cluster of three nodes on this machine, of Debian's packages slurm-wlm and munge."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from commands import WHOLE, Environment, eventually, kill, run, succeed
from ports import free_port

NODES = ("n1", "n2", "n3")
# Requeued jobs start soon instead of after the two minutes for which credentials are valid. All
# other limits of time are those of a slow machine: a node that is lost is told to the controller.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmUser=root
AuthInfo=socket={folder}/munge/socket,cred_expire=20
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SwitchType=switch/none
MpiDefault=none
SlurmdTimeout=300
MessageTimeout=100
TCPTimeout=100
BatchStartTimeout=300
FirstJobId={first_job}
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=n[1-3] Default=YES PriorityTier=1 GraceTime=300
PartitionName=high Nodes=n[1-3] PriorityTier=10
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 State=UNKNOWN\n"


@dataclass
class Cluster:
    """A running cluster, with a partition `low` whose jobs those of `high` preempt."""

    folder: Path
    env: Environment
    daemons: dict[str, subprocess.Popen[bytes]]

    def command(self, *words: str | Path) -> str:
        return succeed([*map(str, words)], self.env, cwd=self.folder).stdout

    def is_idle(self) -> bool:
        done = run(["sinfo", "--noheader", "--partition=low", "--format=%D %t"], self.env)
        return done.stdout.strip() == f"{len(NODES)} idle"

    def submit(self, *words: str | Path, **env: str) -> str:
        """Submit a job; returns its number. Its output is in `<number>.out`."""
        command = ["sbatch", "--parsable", "--output=%j.out", *map(str, words)]
        return succeed(command, {**self.env, **env}, cwd=self.folder).stdout.strip()

    def output(self, job: str) -> str:
        path = self.folder / f"{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`, such as JobState."""
        words = self.command("scontrol", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def wait_for(self, job: str, state: str) -> None:
        eventually(
            lambda: self.field(job, "JobState") == state,
            lambda: f"{state}, not {self.field(job, 'JobState')}:\n{self.output(job)}",
            WHOLE,
        )

    def wait_for_output(self, job: str, text: str) -> None:
        eventually(lambda: text in self.output(job), lambda: self.output(job), WHOLE)

    def processes(self, node: str | None = None) -> list[psutil.Process]:
        """The processes that Slurm started on a node, or on all; its daemons last."""
        found, daemons = [], []
        for process in psutil.process_iter():
            try:
                env = process.environ()
                if env.get("SLURM_CONF") != self.env["SLURM_CONF"] or "SLURMD_NODENAME" not in env:
                    continue
                if node is None or env["SLURMD_NODENAME"] == node:
                    found.append(process)
                    daemons += [each for each in process.parents() if each.name() == "slurmstepd"]
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return [*found, *daemons]

    def lose(self, node: str) -> None:
        """Kill everything on a node, as a power cut would, and tell the controller."""
        self.daemons[node].kill()
        for process in reversed(self.processes(node)):
            kill(process, signal.SIGKILL)
        self.command("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")


def _daemon(command: list[str], env: Environment, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            command, env=env, stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )


def _first_job() -> int:
    """A number of a job whose port, which slurm.sh derives from it, is free."""
    while True:
        number = free_port() - 20_000
        if 0 < number < 10_000:
            return number


@contextmanager
def slurm_cluster(folder: Path, env: Environment) -> Iterator[Cluster]:
    """Start a cluster with its files in a folder; all its processes end with the block."""
    for name in ("state", "munge"):
        (folder / name).mkdir()
    (folder / "munge").chmod(0o755)
    munge = {name: folder / "munge" / name for name in ("key", "socket", "pid", "log", "seed")}
    munge["key"].write_bytes(os.urandom(1024))
    munge["key"].chmod(0o600)
    host = socket.gethostname()
    text = CONFIGURATION.format(
        host=host, folder=folder, controller=free_port(), first_job=_first_job()
    )
    nodes = [NODE.format(name=name, host=host, port=free_port()) for name in NODES]
    configuration = folder / "slurm.conf"
    configuration.write_text(text + "".join(nodes))
    cluster = Cluster(folder, {**env, "SLURM_CONF": str(configuration)}, {})
    files = [
        f"--{option}={munge[name]}"
        for option, name in {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }.items()
    ]
    commands = {
        "munged": ["munged", "--foreground", "--force", *files],
        "slurmctld": ["slurmctld", "-D", "-i"],
        **{node: ["slurmd", "-D", "-N", node] for node in NODES},
    }
    try:
        for name, command in commands.items():
            cluster.daemons[name] = _daemon(command, cluster.env, folder / f"{name}.out")
            if name == "munged":
                eventually(munge["socket"].exists, "munged")
        eventually(cluster.is_idle, "idle nodes")
        yield cluster
    finally:
        for process in cluster.daemons.values():
            process.kill()
            process.wait()
        for each in reversed(cluster.processes()):
            kill(each, signal.SIGKILL)
