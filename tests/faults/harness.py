"""A small training that is disturbed while it runs, and what must hold afterwards.

The launcher is a separate process, as for users. After every fault none of its processes is left
running, the same command completes the training, and its metrics and checkpoint equal those of an
undisturbed training, bit for bit.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from commands import PATIENCE, Running, alive, eventually, is_gone, kill, leftovers
from curves import repeatable, weights
from stopping import Halt, is_pending

from infini_model.config import Config, dump_config, merge, validate
from infini_model.runtime.metrics_file import read_metrics
from infini_model.training.checkpoints.checkpoint import newest_checkpoint

STEPS, SAVE_STEPS = 6, 2
# A rank that is stopped for this long counts as hung, where a strike stops one.
HANG_SECONDS = 20.0
LAUNCH = """
import sys
from pathlib import Path
from infini_model.config import load_config
from infini_model.training.launch.launcher import launch
config, dataset, run_dir = map(Path, sys.argv[1:])
launch(load_config(file=config), dataset, run_dir, on_line=lambda line: print(line, flush=True))
"""
Target = Literal["launcher", "agent", "rank 0", "rank 1"]
Kind = Literal["one", "two", "two sharded"]
KINDS: dict[Kind, dict[str, Any]] = {
    "one": {"launch": {"processes": 1}, "training": {"batch_size": 8}},
    "two": {"launch": {"processes": 2}, "training": {"batch_size": 4}},
    "two sharded": {
        "launch": {"processes": 2, "strategy": "fsdp"},
        "training": {"batch_size": 4, "precision": "fp16"},
    },
}


@dataclass(frozen=True)
class Strike:
    """A signal to one process of a training.

    Attributes:
        number: The signal.
        target: Who gets it.
        moment: After this step, or, where None, while a checkpoint is being written.
        kind: Of the training.
    """

    number: signal.Signals
    target: Target
    moment: int | None
    kind: Kind

    def __str__(self) -> str:
        when = "in a checkpoint" if self.moment is None else f"step {self.moment}"
        return f"{self.number.name} to {self.target} of {self.kind}, {when}"


def every_strike() -> list[Strike]:
    """Each signal to each process at each step, and in the middle of a checkpoint."""
    several: tuple[Target, ...] = ("launcher", "agent", "rank 0", "rank 1")
    targets: dict[Kind, tuple[Target, ...]] = {
        "one": ("launcher", "rank 0"),
        "two": several,
        "two sharded": several,
    }
    return [
        Strike(number, target, moment, kind)
        for kind, names in targets.items()
        for target in names
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
        for moment in (*range(1, STEPS + 1), None)
    ]


def settings(output: Path, kind: Kind, **sections: dict[str, Any]) -> Config:
    """Two layers and six steps of eight windows."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"output_dir": str(output), "seed": 3},
        "packing": {"context_length": 64},
        "model": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "segment_length": 16,
        },
        "training": {"max_steps": STEPS, "warmup_steps": 2},
        "launch": {"gpus": "cpu", "hang_timeout_seconds": PATIENCE},
        "logging": {"logging_steps": 1, "eval_steps": 4},
        "evaluation": {"max_windows": 4},
        "checkpoint": {"save_steps": SAVE_STEPS},
        "tracking": {"mlflow": False, "tensorboard": False},
    }
    return validate(merge(merge(tree, KINDS[kind]), sections))


class Trial:
    """A training in its own folder."""

    def __init__(self, folder: Path, dataset: Path, config: Config, env: dict[str, str]) -> None:
        self.run_dir = folder / "run"
        self._folder, self._dataset, self._env = folder, dataset, env
        self._settings = folder / "settings.yaml"
        self._settings.write_text(dump_config(config), encoding="utf-8")
        self._started: list[Running] = []

    def start(self, halt: Halt | None = None) -> Running:
        """Launch it, or resume it; its ranks halt at the moment of `halt`."""
        command = [sys.executable, "-c", LAUNCH, self._settings, self._dataset, self.run_dir]
        log = self._folder / f"launch-{len(self._started)}.log"
        env = self._env | (halt.environment if halt else {})
        self._started.append(Running(list(map(str, command)), log, env))
        return self._started[-1]

    def everyone(self) -> list[psutil.Process]:
        """Every live process with the run folder in its arguments."""
        found = []
        for process in psutil.process_iter():
            try:
                if str(self.run_dir) in process.cmdline():
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return alive(found)

    def process(self, target: Target, launcher: Running) -> psutil.Process:
        """The target process, which is alive."""
        if target == "launcher":
            return psutil.Process(launcher.process.pid)
        for process in self.everyone():
            try:
                words, variables = process.cmdline(), process.environ()
            except psutil.NoSuchProcess:
                continue
            is_agent = "infini_model.training.launch.agent" in words
            is_rank = "infini_model.training" in words and not is_agent
            if target == "agent" and is_agent:
                return process
            if is_rank and target == f"rank {variables.get('RANK', '0')}":
                return process
        raise AssertionError(f"no {target}:\n{launcher.output}")

    def halt(self, moment: int | None) -> Halt:
        """What halts its ranks after a step, or rank 0 in a checkpoint."""
        steps = [] if moment is None else [moment]
        return Halt(self._folder / "halt", *steps, in_a_checkpoint=moment is None)

    @property
    def logs(self) -> list[Path]:
        """The logs of all launches."""
        return [running.log for running in self._started]

    def finish(self) -> None:
        """Launch it again; it must succeed."""
        launcher = self.start()
        assert launcher.wait() == 0, launcher.output

    def end(self) -> None:
        """Kill everything that is still running."""
        for running in self._started:
            running.end()
        for process in self.everyone():
            kill(process, signal.SIGKILL)

    def outcome(self) -> tuple[object, object]:
        """The results that must not depend on disturbances."""
        return repeatable(self.run_dir), weights(self.run_dir)


def strike(trial: Trial, fault: Strike) -> None:
    """Launch the training, strike while its ranks are halted, and check that all of it ends."""
    halt = trial.halt(fault.moment)
    launcher = trial.start(halt)
    halted = halt.wait(1 if fault.kind == "one" or fault.moment is None else 2)
    target = trial.process(fault.target, launcher)
    target.send_signal(fault.number)
    if fault.number == signal.SIGSTOP:
        eventually(lambda: target.status() == psutil.STATUS_STOPPED, f"the stop by {fault}")
    elif fault.number == signal.SIGTERM:
        # Whoever gets it passes it on; a rank acts on it once it goes on.
        asked = [rank for rank in halted if not fault.target.startswith("rank") or rank == target]
        eventually(lambda: all(map(_has_sigterm, asked)), f"SIGTERM by {fault}")
    else:
        eventually(lambda: is_gone(target.pid), f"the death by {fault}")
    for rank in halted:
        if fault.number != signal.SIGSTOP or rank != target:
            kill(rank, signal.SIGCONT)
    if fault.number == signal.SIGSTOP and fault.target == "launcher":
        # Nothing is left to detect the stop: the ranks train on, and then it is continued.
        eventually(lambda: _last_step(trial) == STEPS, f"the last step after {fault}")
        target.send_signal(signal.SIGCONT)
        assert launcher.wait() == 0, launcher.output
        return
    eventually(lambda: not trial.everyone(), f"the end of all after {fault}")
    status = launcher.wait()
    # A rank that is asked after the last step may have ended before it would stop.
    assert status != 0 or (fault.number, fault.moment) == (signal.SIGTERM, STEPS), launcher.output
    if fault.number == signal.SIGTERM and status != 0:
        # On a stop request it saves a checkpoint.
        checkpoint = newest_checkpoint(trial.run_dir)
        assert checkpoint is not None
        assert checkpoint.name == f"step-{_last_step(trial)}"


def _has_sigterm(rank: psutil.Process) -> bool:
    return is_pending(rank, signal.SIGTERM)


def _last_step(trial: Trial) -> int:
    return max((int(line["step"]) for line in read_metrics(trial.run_dir)), default=0)


def survives(trial: Trial, undisturbed: tuple[object, object]) -> None:
    """The same command finishes the training with the undisturbed outcome."""
    trial.finish()
    assert trial.outcome() == undisturbed
    assert not leftovers(trial.run_dir)


Damage = Callable[[Path], object]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Damage] = {
    "removed": Path.unlink,
    "truncated": _truncate,
    "one bit": _flip,
    "empty": lambda path: path.write_bytes(b""),
}
