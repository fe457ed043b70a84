"""torchrun, as the launcher starts it: `python -m infini_model.training.agent RUN_DIR OPTIONS …`.

It runs `torch.distributed.run` with the options it is given and adds an end that can be told: how
each rank ended is left in the run folder, and its own exit status is that of the ranks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from infini_model.training.failures import EXIT_CRASH, save_exit_codes

# Tells the ranks who started them, so that they notice if it is gone already.
AGENT = "INFINI_AGENT_PID"


def main() -> int:
    """Run torchrun until its ranks have ended; returns the exit status for the launcher."""
    # Here, because the ranks import this module for the name above, before they load torch.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    os.environ[AGENT] = str(os.getpid())
    try:
        run(parse_args(sys.argv[2:]))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        save_exit_codes(Path(sys.argv[1]), codes)
        return max((code for code in codes.values() if code > 0), default=EXIT_CRASH)
    except SignalException as stop:
        return 128 + int(stop.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
