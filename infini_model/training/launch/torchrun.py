"""torchrun with an orderly shutdown: `python -m infini_model.training.launch.torchrun OPTION …`.

It forwards SIGTERM to the ranks and waits for them. After a rank fails, it ends the others within
seconds, tells the other machines why and asks them, and saves the first cause where the launcher
reads it.

torchrun always starts ranks through `torch.distributed.elastic.multiprocessing.SubprocessContext`,
so `main` replaces that class by `Ranks`. It overrides `_start`, from which on signals are forwarded
to the ranks, and `_close`, which ends the remaining ranks: here the first exit codes are known, on
which it depends how long to wait (torchrun always waits 30 s), and no other rank has been killed
yet. tests/infini_model/training/launch/test_launch.py fails if a torch release renames either, or
the attributes of theirs that are read here.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import ClassVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from infini_model.runtime.processes import STOPS, oom_kills
from infini_model.training import AGENT
from infini_model.training.launch.devices import physical_gpu
from infini_model.training.launch.failures import (
    EXIT_CRASH,
    EXIT_NON_FINITE,
    TrainingFailure,
    first_cause,
    read_failure,
)

# From the first exit of a rank to SIGKILL for the others, which may be stuck waiting for it. After
# a coordinated exit, all ranks stop for the same reason and may have a checkpoint to write.
DEATH_SECONDS = 5
SAVE_SECONDS = 50
COORDINATED_EXITS = frozenset({EXIT_NON_FINITE, *(128 + number for number in STOPS)})
# How long an agent waits for the others: their ranks take five seconds to end, or longer on a busy
# machine. A machine that is lost says nothing.
PATIENCE = timedelta(seconds=30)


class Ranks(multiprocessing.SubprocessContext):
    """The processes of torchrun's ranks, with forwarded signals and an orderly shutdown."""

    stopped_by: ClassVar[int | None] = None
    oom_kills: ClassVar[int] = 0
    _close_seconds: int | None = None

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
        if self._close_seconds is not None:
            super()._close(death_sig, self._close_seconds)
            return
        by_kernel = oom_kills() > Ranks.oom_kills
        exits = {rank: end.exitcode for rank, end in self._failures.items()}
        is_coordinated = bool(exits) and COORDINATED_EXITS.issuperset(exits.values())
        self._close_seconds = SAVE_SECONDS if is_coordinated else DEATH_SECONDS
        super()._close(death_sig, self._close_seconds)
        found = []
        for local, path in self.error_files.items() if exits else ():
            if (reported := read_failure(Path(path))) is not None:
                found.append(reported)
            elif local in exits:
                place = int(self.envs[local]["RANK"]), physical_gpu(local)
                found.append(TrainingFailure.of_exit(exits[local], *place, by_kernel=by_kernel))
        if exits and (cause := first_cause(found + _found_elsewhere(found, self.envs[0]))):
            cause.save()


def _found_elsewhere(
    own: Sequence[TrainingFailure], rank_environment: Mapping[str, str]
) -> list[TrainingFailure]:
    """Tell the other machines what failed here, and return what has failed there.

    They need not share a folder, and see no more than a connection that breaks. The agents meet in
    the store of torchrun's rendezvous, which that of the first machine keeps for as long as the
    others listen. `rank_environment` is what torchrun has set for one of its ranks.
    """
    machines, here = (int(rank_environment[f"GROUP_{name}"]) for name in ("WORLD_SIZE", "RANK"))
    others = [number for number in range(machines) if number != here]
    found: list[TrainingFailure] = []
    # torch's own errors are RuntimeErrors: the first machine is lost, or another says nothing.
    with contextlib.suppress(RuntimeError):
        if others:
            address, port = rank_environment["MASTER_ADDR"], int(rank_environment["MASTER_PORT"])
            store = TCPStore(address, port, timeout=PATIENCE, wait_for_workers=False)
            store.set(f"infini/reported/{here}", json.dumps([asdict(each) for each in own]))
            with contextlib.suppress(RuntimeError):
                store.wait([f"infini/reported/{number}" for number in others])
            reported = [n for n in others if store.check([f"infini/reported/{n}"])]
            for number in reported:
                failures = json.loads(store.get(f"infini/reported/{number}"))
                found += [TrainingFailure(**each) for each in failures]
            store.set(f"infini/acknowledged/{here}", "")
            if here == 0:
                store.wait([f"infini/acknowledged/{number}" for number in reported])
    return found


def main() -> int:
    """Run torchrun until all ranks have ended; returns the exit status for the launcher."""
    os.environ[AGENT] = str(os.getpid())
    Ranks.oom_kills = oom_kills()
    multiprocessing.SubprocessContext = Ranks  # type: ignore[misc]
    try:
        # torchrun's handlers would raise at whatever line they interrupt; SIGQUIT is not used.
        options = ["--signals-to-handle=SIGQUIT", *sys.argv[1:]]
        run(parse_args(options))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        if Ranks.stopped_by is not None:
            return 128 + Ranks.stopped_by
        codes = [failure.exitcode for failure in error.failures.values()]
        return max((code for code in codes if code > 0), default=EXIT_CRASH)
    return 0


if __name__ == "__main__":
    sys.exit(main())
