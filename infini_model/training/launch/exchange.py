"""What the agents of several machines tell each other about a training that has failed.

The machines need not share a folder, and where a rank fails on one of them, the others see no more
than a connection that breaks. They meet in the store of torchrun's rendezvous, which the agent of
the first machine keeps for as long as the others listen.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from infini_model.training.launch.failures import keep_reports, read_reports

# How long an agent waits for the others: their ranks take five seconds to end, or longer on a busy
# machine. A machine that is lost says nothing.
PATIENCE = timedelta(seconds=30)


def exchange_failures(run_dir: Path, rank_environment: Mapping[str, str]) -> None:
    """Send this machine's reports to the others, and bring theirs into the run folder here.

    `rank_environment` is what torchrun has set for one of its ranks.
    """
    machines, own = (int(rank_environment[f"GROUP_{name}"]) for name in ("WORLD_SIZE", "RANK"))
    others = [number for number in range(machines) if number != own]
    if not others:
        return
    # torch's own errors are RuntimeErrors: the first machine is lost, or another says nothing.
    with contextlib.suppress(RuntimeError):
        address, port = rank_environment["MASTER_ADDR"], int(rank_environment["MASTER_PORT"])
        store = TCPStore(address, port, timeout=PATIENCE, wait_for_workers=False)
        store.set(_told(own), json.dumps(read_reports(run_dir)))
        with contextlib.suppress(RuntimeError):
            store.wait([_told(number) for number in others])
        telling = [number for number in others if store.check([_told(number)])]
        for number in telling:
            keep_reports(run_dir, json.loads(store.get(_told(number))))
        store.set(_heard(own), "")
        if own == 0:
            store.wait([_heard(number) for number in telling])


def _told(machine: int) -> str:
    return f"infini/told/{machine}"


def _heard(machine: int) -> str:
    return f"infini/heard/{machine}"
