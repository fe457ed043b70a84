"""Signals to a training at a step that a test chooses: in this process, or in every rank."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import psutil

from infini_model.training.callbacks import Callback, Evaluation, Step

# Python reads a sitecustomize.py at its start: what follows this is run by ranks alone.
IN_A_RANK = """
import sys
if "infini_model.training" in sys.orig_argv and not any(
    word.endswith(("runtime/processes.py", "infini_model.training.launch.torchrun"))
    for word in sys.orig_argv
):"""
# A rank that has logged a step writes a file and stops itself; the file keeps it from stopping
# again when the step is repeated.
_SITE = (
    IN_A_RANK
    + """
    import logging, os, pathlib, signal
    rank = os.environ.get("RANK", "0")
    run = pathlib.Path(sys.orig_argv[sys.orig_argv.index("--run-dir") + 1]).name
    call_handlers = logging.Logger.callHandlers
    def halt(moment):
        halted = pathlib.Path({folder!r}, f"rank-{{rank}}-{{run}}-{{moment}}")
        if not halted.exists():
            halted.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
    def call_handlers_and_halt(logger, record):
        call_handlers(logger, record)
        for step in {steps!r}:
            if f"Step [{{step}}/" in record.getMessage():
                halt(step)
    logging.Logger.callHandlers = call_handlers_and_halt
"""
)


class StopAfter(Callback):
    """Sends this process a signal after the validation at step 0, or after a later step."""

    def __init__(self, step: int, number: int = signal.SIGTERM) -> None:
        self.step, self.number = step, number

    def after_evaluation(self, evaluation: Evaluation, metrics: Mapping[str, float]) -> None:
        if evaluation.step == self.step == 0:
            os.kill(os.getpid(), self.number)

    def after_step(self, step: Step, metrics: Mapping[str, float]) -> None:
        if step.number == self.step:
            os.kill(os.getpid(), self.number)


class Halt:
    """Every rank of a run stops itself (SIGSTOP) once, right after it has logged one of `steps`.

    A test that polls for a step and then sends a signal races with the end of the training. A rank
    that has halted waits for the signal: one other than SIGKILL stays pending (`is_pending`) until
    `resume`. The launcher takes a process that is stopped for `launch.hang_timeout_seconds` for
    hung, so set it to `PATIENCE`. The thread that writes checkpoints stops as well: the newest one
    may be unfinished for ever, and the one before it is on disk.

    `environment` is laid over that of the command. The steps must be among those that are logged.
    """

    def __init__(self, folder: Path, *steps: int) -> None:
        self._folder = folder
        folder.mkdir()
        site = _SITE.format(folder=str(folder), steps=steps)
        (folder / "sitecustomize.py").write_text(site, encoding="utf-8")
        self.environment = {"PYTHONPATH": str(folder)}

    def ranks(self) -> list[psutil.Process]:
        """The ranks that have halted and have not been killed since, by number."""
        found = []
        pids = [int(path.read_text() or 0) for path in sorted(self._folder.glob("rank-*"))]
        for pid in dict.fromkeys(pids):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                found += [process] if process.status() == psutil.STATUS_STOPPED else []
        return found

    def wait(self, count: int = 1) -> list[psutil.Process]:
        """Wait until so many ranks have halted, and return them."""
        from commands import WHOLE, eventually

        eventually(lambda: len(self.ranks()) == count, f"{count} ranks that have halted", WHOLE)
        return self.ranks()

    def resume(self) -> None:
        """Let the halted ranks go on."""
        for rank in self.ranks():
            rank.resume()

    def resume_told(self) -> None:
        """Let the halted ranks go on, all of which are sent SIGTERM."""
        from commands import eventually

        ranks = self.ranks()
        assert ranks
        eventually(lambda: all(is_pending(rank, signal.SIGTERM) for rank in ranks), "SIGTERM")
        self.resume()


def is_pending(process: psutil.Process, number: signal.Signals) -> bool:
    """Whether a signal is pending for a stopped process."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    (mask,) = [line.split()[1] for line in lines if line.startswith("ShdPnd:")]
    return bool(int(mask, 16) >> (number - 1) & 1)
