"""Why a training failed: one class, from a rank through torchrun to the caller of the launcher.

A process that fails writes why into the file that `TORCHELASTIC_ERROR_FILE` names. torchrun names
one for each rank, and the launcher one for the process that it starts, be that the only rank, the
agent of several (`infini_model.training.launch.torchrun`) or the driver on a Ray cluster. A rank
that a signal kills writes nothing: its exit code tells. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from infini_model.runtime.errors import NonFiniteError, StageError, UserError
from infini_model.runtime.processes import STOPS
from infini_model.runtime.storage import write_json

EXIT_CRASH, EXIT_USER_ERROR, EXIT_NON_FINITE = 1, 2, 3
# Environment variable: the file in which a process says why it failed. The name is torchrun's.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

Kind = Literal["user error", "non-finite", "preempted", "out of memory", "hang", "crash"]
# When the host is out of memory, torch raises a plain RuntimeError, known only by its text.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(eq=False, repr=False)
class TrainingFailure(StageError):  # noqa: N818 - preemption is no error
    """A training ended early. It resumes from the newest checkpoint, unless that would not help.

    Attributes:
        kind: How it ended: `preempted` is by a signal, after which a checkpoint was saved if the
            training had started; `hang` that a process was stopped, or no step completed for much
            longer than steps take.
        rank: The rank that failed first; None if that is not known.
        gpu: The physical number of its GPU; None on the CPU, or if that is not known.
        is_killed: Whether a signal killed the rank.
        timestamp: When, in seconds since the epoch.
        is_final: Whether a retry would not help; the launcher sets it.
    """

    kind: Kind
    message: str
    rank: int | None = None
    gpu: int | None = None
    is_killed: bool = False
    timestamp: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        # The arguments make another one of it, in another process.
        super().__init__(*asdict(self).values())

    def __str__(self) -> str:
        if self.kind == "preempted":
            return f"training stopped: {self.kind}: {self.message}"
        gpu = "" if self.gpu is None else f" (GPU {self.gpu})"
        where = "" if self.rank is None else f" on rank {self.rank}{gpu}"
        return f"training failed: {self.kind}{where}: {self.message}"

    @classmethod
    def of(
        cls, error: Exception, rank: int | None = None, gpu: int | None = None
    ) -> TrainingFailure:
        """The failure of a process that ends with `error`; itself if it is one."""
        if isinstance(error, TrainingFailure):
            return error
        kind: Kind = "crash"
        if isinstance(error, UserError):
            kind = "user error"
        elif isinstance(error, NonFiniteError):
            kind = "non-finite"
        elif isinstance(error, MemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY):
            kind = "out of memory"
        message = str(error) or type(error).__name__
        return cls(kind, message, rank, gpu)

    @classmethod
    def of_exit(
        cls, code: int, rank: int | None = None, gpu: int | None = None, *, by_kernel: bool = False
    ) -> TrainingFailure:
        """The failure of a process that has not said why it exited with `code`, as Python has it.

        `by_kernel` says whether the kernel's OOM killer has killed processes meanwhile.
        """
        number = -code if code < 0 else code - 128
        if number in STOPS:
            name = signal.Signals(number).name
            return cls("preempted", f"{name} received before training started", rank, gpu)
        if code >= 0:
            # The kind is known even if the rank could not write why.
            kinds: dict[int, Kind] = {EXIT_USER_ERROR: "user error", EXIT_NON_FINITE: "non-finite"}
            message = f"exit code {code}; see the logs folder of the run"
            return cls(kinds.get(code, "crash"), message, rank, gpu)
        if number == signal.SIGKILL and by_kernel:
            message = "killed by the kernel: the machine ran out of memory"
            return cls("out of memory", message, rank, gpu, is_killed=True)
        message = f"killed by {signal.Signals(number).name}"
        return cls("crash", message, rank, gpu, is_killed=True)

    @property
    def exit_status(self) -> int:
        """The exit status of a process that fails in this way."""
        if self.kind == "user error":
            return EXIT_USER_ERROR
        return EXIT_NON_FINITE if self.kind == "non-finite" else EXIT_CRASH

    def as_error(self) -> TrainingFailure | UserError:
        """The exception that `launch` raises for it."""
        return UserError(self.message) if self.kind == "user error" else self

    def save(self) -> None:
        """Write it to the file that `ERROR_FILE` names, if there is one that can be written."""
        if path := os.environ.get(ERROR_FILE):
            with contextlib.suppress(OSError, UserError):
                write_json(Path(path), asdict(self))


def read_failure(path: Path) -> TrainingFailure | None:
    """What a process has saved; None if it has not."""
    try:
        return TrainingFailure(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def first_cause(failures: Iterable[TrainingFailure]) -> TrainingFailure | None:
    """The failure behind those of all ranks; None of none.

    It is that of a rank that a signal has killed: the connections of the others break before the
    agent sees the death. Otherwise it is the earliest of those that tell more than a crash, if
    there are any: clocks differ, and what breaks elsewhere is a crash for all others.
    """
    return min(
        failures,
        key=lambda each: (not each.is_killed, each.kind == "crash", each.timestamp),
        default=None,
    )
