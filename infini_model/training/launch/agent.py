"""torchrun, started by the launcher as `python -m infini_model.training.launch.agent RUN_DIR …`.

It runs `torch.distributed.run` with the given options and adds an orderly shutdown: it forwards
SIGTERM to the ranks and waits for them; after a rank fails, it ends the other ranks within seconds,
saves the first exit codes in the run folder and exits with theirs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from infini_model.training import AGENT
from infini_model.training.launch.failures import EXIT_CRASH
from infini_model.training.launch.torchelastic import Ranks, install


def main() -> int:
    """Run torchrun until all ranks have ended; returns the exit status for the launcher."""
    os.environ[AGENT] = str(os.getpid())
    install(Path(sys.argv[1]))
    try:
        # torchrun's handlers would raise at whatever line they interrupt; SIGQUIT is not used.
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
