"""torchrun, started by the launcher as `python -m infini_model.training.launch.agent RUN_DIR …`.

It runs `torch.distributed.run` with the options it is given and adds an end that can be told:
SIGTERM is passed on to the ranks, which are then waited for; a rank that fails takes the others
with it within seconds; how the first ones ended is left in the run folder, and the exit status is
theirs.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import ClassVar

from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from infini_model.runtime.processes import STOPS
from infini_model.training import AGENT
from infini_model.training.launch.failures import EXIT_CRASH, EXIT_NON_FINITE, save_exit_codes

# From the end of one rank to SIGKILL for the others, which may be stuck waiting for it; but where
# all end for the same reason, they may have a checkpoint or a report to write.
DEATH_SECONDS = 5
SAVE_SECONDS = 50
TOGETHER = frozenset({EXIT_NON_FINITE, *(128 + number for number in STOPS)})


class Ranks(multiprocessing.SubprocessContext):
    """The processes of torchrun's ranks, and how they come to their end."""

    run_dir: ClassVar[Path]
    stopped_by: ClassVar[int | None] = None
    _patience: int | None = None

    def _start(self) -> None:
        for number in STOPS:
            signal.signal(number, self._pass_on)
        super()._start()  # type: ignore[no-untyped-call]

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        Ranks.stopped_by = number
        if not self.subprocess_handlers:
            # Some are being started and have nothing to save; they die with this process.
            os._exit(128 + number)
        for handler in self.subprocess_handlers.values():
            handler.proc.send_signal(signal.SIGTERM)

    def _close(self, death_sig: signal.Signals, timeout: int = 0) -> None:  # noqa: ARG002
        """End those that still run, as torchrun asks when the first has failed, and again later."""
        if self._patience is None:
            codes = {int(self.envs[i]["RANK"]): end.exitcode for i, end in self._failures.items()}
            if codes:
                save_exit_codes(self.run_dir, codes)
            together = bool(codes) and TOGETHER.issuperset(codes.values())
            self._patience = SAVE_SECONDS if together else DEATH_SECONDS
        super()._close(death_sig, self._patience)


def main() -> int:
    """Run torchrun until its ranks have ended; returns the exit status for the launcher."""
    os.environ[AGENT] = str(os.getpid())
    Ranks.run_dir = Path(sys.argv[1])
    multiprocessing.SubprocessContext = Ranks  # type: ignore[misc]
    try:
        # Its own handlers would raise an exception wherever they interrupt; SIGQUIT never comes.
        options = ["--signals-to-handle=SIGQUIT", *sys.argv[2:]]
        run(parse_args(options))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        if Ranks.stopped_by is not None:
            return 128 + Ranks.stopped_by
        codes = [failure.exitcode for failure in error.failures.values()]
        return max((code for code in codes if code > 0), default=EXIT_CRASH)
    return 0


if __name__ == "__main__":
    sys.exit(main())
