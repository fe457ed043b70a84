"""A small training that is disturbed while it runs, and what must hold afterwards.

The launcher is a separate process, as for users. After every fault none of its processes is left
running, the same command completes the training, and its metrics and checkpoint equal those of an
undisturbed training, bit for bit.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from commands import Running, alive, eventually, kill, leftovers
from curves import repeatable, weights

from infini_model.config import Config, dump_config, merge, validate
from infini_model.runtime.metrics_file import read_metrics
from infini_model.training.checkpoints.checkpoint import newest_checkpoint

STEPS, SAVE_STEPS = 6, 2
# Nothing may be left running after this many seconds.
END_SECONDS = 10.0
# A rank without a step for this long counts as hung; a step takes 20 ms.
HANG_SECONDS = 4.0
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
        "launch": {"gpus": "cpu", "hang_timeout_seconds": HANG_SECONDS},
        "logging": {"logging_steps": 1, "eval_steps": 4},
        "evaluation": {"max_windows": 4},
        "checkpoint": {"save_steps": SAVE_STEPS},
        "tracking": {"mlflow": False, "tensorboard": False},
    }
    return validate(merge(tree, KINDS[kind]) | sections)


class Trial:
    """A training in its own folder."""

    def __init__(self, folder: Path, dataset: Path, config: Config, env: dict[str, str]) -> None:
        self.run_dir = folder / "run"
        self._folder, self._dataset, self._env = folder, dataset, env
        self._settings = folder / "settings.yaml"
        self._settings.write_text(dump_config(config), encoding="utf-8")
        self._started: list[Running] = []

    def start(self) -> Running:
        """Launch it, or resume it."""
        command = [sys.executable, "-c", LAUNCH, self._settings, self._dataset, self.run_dir]
        log = self._folder / f"launch-{len(self._started)}.log"
        self._started.append(Running(list(map(str, command)), log, self._env))
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

    def process(self, target: Target, launcher: Running) -> psutil.Process | None:
        """The target process, unless it has ended."""
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
        return None

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
    """Launch the training, strike, and check that all of it ends in time."""
    launcher = trial.start()
    _wait_for(trial, launcher, fault.moment)
    target = trial.process(fault.target, launcher)
    if target is None:
        return  # It was faster than the blow.
    kill(target, fault.number)
    if fault.number == signal.SIGSTOP and fault.target == "launcher":
        # Nothing is left to detect the stop; continue it from here.
        time.sleep(0.5)
        kill(target, signal.SIGCONT)
        assert launcher.wait() == 0, launcher.output
        return
    patience = END_SECONDS + (HANG_SECONDS if fault.number == signal.SIGSTOP else 0.0)
    eventually(lambda: not trial.everyone(), f"the end of all after {fault}", seconds=patience)
    if fault.number == signal.SIGTERM and launcher.wait() != 0:
        # On a stop request it saves a checkpoint.
        last = max((line["step"] for line in read_metrics(trial.run_dir)), default=0)
        checkpoint = newest_checkpoint(trial.run_dir)
        assert checkpoint is not None
        assert checkpoint.name == f"step-{last}"


def _wait_for(trial: Trial, launcher: Running, moment: int | None) -> None:
    """Wait for the moment to strike, or until the training has ended."""
    if moment is not None:
        launcher.wait_for(f"Step [{moment}/{STEPS}]")
        return
    checkpoints = trial.run_dir / "checkpoints"
    while launcher.process.poll() is None:
        if checkpoints.is_dir() and any(p.name.startswith(".tmp-") for p in checkpoints.iterdir()):
            return


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
