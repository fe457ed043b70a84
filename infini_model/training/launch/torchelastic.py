"""All names of torchelastic that this project overrides or reads.

torchrun always starts ranks through `torch.distributed.elastic.multiprocessing.SubprocessContext`,
so `install` replaces that class by `Ranks`, which overrides

- `_start`, which starts the ranks: from here on signals are forwarded to them, where torchrun's
  own handlers would raise an exception at whatever line they interrupt;
- `_close`, which ends the remaining ranks: here the first exit codes are known and no other rank
  has been killed yet. How long it waits for them depends on those codes; torchrun always waits
  30 s. Then other machines are told, and asked;

and reads `_failures`, `envs` and `subprocess_handlers`: exit codes, environments and processes.
tests/infini_model/training/launch/test_launch.py fails if a torch release renames any of them.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType
from typing import ClassVar

from torch.distributed.elastic import multiprocessing

from infini_model.runtime.processes import STOPS, oom_kills
from infini_model.training.launch.devices import physical_gpu
from infini_model.training.launch.exchange import exchange_failures
from infini_model.training.launch.failures import EXIT_NON_FINITE, Exit, save_exits

# From the first exit of a rank to SIGKILL for the others, which may be stuck waiting for it. After
# a coordinated exit, all ranks stop for the same reason and may have a checkpoint to write.
DEATH_SECONDS = 5
SAVE_SECONDS = 50
COORDINATED_EXITS = frozenset({EXIT_NON_FINITE, *(128 + number for number in STOPS)})


class Ranks(multiprocessing.SubprocessContext):
    """The processes of torchrun's ranks, with forwarded signals and an orderly shutdown."""

    run_dir: ClassVar[Path]
    stopped_by: ClassVar[int | None] = None
    oom_kills: ClassVar[int] = 0
    _close_seconds: int | None = None
    _is_failed = False

    def _start(self) -> None:
        for number in STOPS:
            signal.signal(number, self._forward)
        super()._start()  # type: ignore[no-untyped-call]

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        Ranks.stopped_by = number
        if not self.subprocess_handlers:
            # Ranks that are just starting have nothing to save; they die with this process.
            os._exit(128 + number)
        for handler in self.subprocess_handlers.values():
            handler.proc.send_signal(signal.SIGTERM)

    def _close(self, death_sig: signal.Signals, timeout: int = 0) -> None:  # noqa: ARG002
        """End the remaining ranks; torchrun calls this after the first failure, and again later."""
        if self._close_seconds is None:
            by_kernel = oom_kills() > Ranks.oom_kills
            exits = [
                Exit(int(self.envs[rank]["RANK"]), physical_gpu(rank), end.exitcode, by_kernel)
                for rank, end in self._failures.items()
            ]
            if exits:
                save_exits(self.run_dir, exits)
            coordinated = bool(exits) and COORDINATED_EXITS.issuperset(end.code for end in exits)
            self._close_seconds = SAVE_SECONDS if coordinated else DEATH_SECONDS
            self._is_failed = bool(exits)
        super()._close(death_sig, self._close_seconds)
        if self._is_failed:
            self._is_failed = False
            exchange_failures(self.run_dir, self.envs[0])


def install(run_dir: Path) -> None:
    """Have torchrun start its ranks through `Ranks`, which saves exit codes in `run_dir`."""
    Ranks.run_dir, Ranks.oom_kills = run_dir, oom_kills()
    multiprocessing.SubprocessContext = Ranks  # type: ignore[misc]
