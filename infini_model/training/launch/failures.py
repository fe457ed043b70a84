"""Why a training failed, passed from a rank through torchrun to the caller of the launcher.

A rank that fails writes `logs/failures/rank-N.json`. A rank killed by a signal cannot, so the agent
writes the exit codes beside it, and brings there what other machines have. The launcher picks the
cause from these files and raises one `TrainingFailure`. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from infini_model.runtime import processes
from infini_model.runtime.errors import DataError, StageError, UserError
from infini_model.runtime.storage import write_json

EXIT_CRASH = 1
EXIT_USER_ERROR = 2
EXIT_NON_FINITE = 3
STOPS = processes.STOPS
REPORT = re.compile(r"(rank|exit-codes-of)-\d+\.json")

Kind = Literal[
    "user error",
    "data",
    "non-finite",
    "preempted",
    "out of memory",
    "hang",
    "timeout",
    "crash",
]


class TrainingFailure(StageError):  # noqa: N818 - preemption is no error
    """A training ended early.

    Attributes:
        kind: How it ended.
        message: Why, in one line.
        rank: The rank that failed first; None if that is not known.
        gpu: The physical number of its GPU; None on the CPU, or if that is not known.
        is_final: Whether a retry would not help; the launcher sets it.
        times: How many attempts in a row have ended with this message; the launcher sets it.
    """

    kind: ClassVar[Kind] = "crash"
    is_final = False
    times = 1

    def __init__(self, message: str, rank: int | None = None, gpu: int | None = None) -> None:
        super().__init__(message, rank, gpu)
        self.message = message
        self.rank = rank
        self.gpu = gpu

    def __str__(self) -> str:
        gpu = "" if self.gpu is None else f" (GPU {self.gpu})"
        where = "" if self.rank is None else f" on rank {self.rank}{gpu}"
        return f"training failed: {self.kind}{where}: {self.message}"


class Crashed(TrainingFailure):
    """A bug or a signal; the training can be resumed from the newest checkpoint."""


class NonFiniteFailure(TrainingFailure):
    """The loss or a gradient was NaN or infinite; the newest checkpoint was saved before that.

    `consumed` is the number of windows read before the global batch at fault; None if it was not
    a batch.
    """

    kind: ClassVar[Kind] = "non-finite"
    consumed: int | None = None


class Preempted(TrainingFailure):
    """SIGTERM or SIGINT was received; a checkpoint was saved if training had started."""

    kind: ClassVar[Kind] = "preempted"

    def __str__(self) -> str:
        return f"training stopped: {self.kind}: {self.message}"


class OutOfMemory(TrainingFailure):
    """A device or the machine ran out of memory."""

    kind: ClassVar[Kind] = "out of memory"


class Hung(TrainingFailure):
    """A process was stopped, or no step completed for much longer than steps take."""

    kind: ClassVar[Kind] = "hang"


class TimedOut(TrainingFailure):
    """The training exceeded the launcher's timeout."""

    kind: ClassVar[Kind] = "timeout"


_TYPES: dict[Kind, type[TrainingFailure]] = {
    failure.kind: failure
    for failure in (Crashed, NonFiniteFailure, Preempted, OutOfMemory, Hung, TimedOut)
}
_USER_ERRORS: dict[Kind, type[UserError]] = {"user error": UserError, "data": DataError}


@dataclass(frozen=True)
class Report:
    """How one rank failed, on which physical GPU (None on the CPU), and when.

    `rank` is None where the failure is not that of a rank; `consumed` is that of
    `NonFiniteFailure`.
    """

    kind: Kind
    message: str
    rank: int | None
    gpu: int | None
    time: float
    consumed: int | None = None

    @classmethod
    def now(
        cls,
        kind: Kind,
        message: str,
        rank: int | None,
        gpu: int | None,
        consumed: int | None = None,
    ) -> Report:
        """A report with the current time."""
        return cls(kind, message, rank, gpu, time.time(), consumed)

    @classmethod
    def of(cls, error: Exception) -> Report:
        """What `launch` has raised, to be raised elsewhere by `as_error`."""
        if isinstance(error, TrainingFailure):
            consumed = getattr(error, "consumed", None)
            return cls.now(error.kind, error.message, error.rank, error.gpu, consumed)
        if isinstance(error, UserError):
            kind: Kind = "data" if isinstance(error, DataError) else "user error"
            return cls.now(kind, str(error), None, None)
        return cls.now("crash", str(error) or type(error).__name__, None, None)

    def as_error(self) -> TrainingFailure | UserError:
        """The failure as the launcher raises it."""
        if self.kind in _USER_ERRORS:
            return _USER_ERRORS[self.kind](self.message)
        failure = _TYPES[self.kind](self.message, self.rank, self.gpu)
        if isinstance(failure, NonFiniteFailure):
            failure.consumed = self.consumed
        return failure

    def save(self, run_dir: Path) -> None:
        """Write it to the run folder, if that can be written at all."""
        name = "launcher.json" if self.rank is None else f"rank-{self.rank}.json"
        with contextlib.suppress(OSError, UserError):
            write_json(_folder(run_dir) / name, asdict(self))


def _folder(run_dir: Path) -> Path:
    return run_dir / "logs" / "failures"


class Exit(NamedTuple):
    """The exit code of a rank, negative for a signal, and the physical number of its GPU.

    `by_kernel` says whether the kernel's OOM killer has killed processes of its machine meanwhile.
    """

    rank: int
    gpu: int | None
    code: int
    by_kernel: bool = False


def save_exits(run_dir: Path, exits: Sequence[Exit]) -> None:
    """Save how the ranks of a machine that ended first ended, if the folder can be written."""
    first = min(end.rank for end in exits)
    with contextlib.suppress(OSError, UserError):
        write_json(
            _folder(run_dir) / f"exit-codes-of-{first}.json", [end._asdict() for end in exits]
        )


def clear(run_dir: Path) -> None:
    """Delete the reports of an earlier launch, partially written ones too."""
    for path in _folder(run_dir).glob("*"):
        path.unlink(missing_ok=True)


def read_reports(run_dir: Path) -> dict[str, Any]:
    """What the ranks and agents of this machine have reported, by file name."""
    found = [path for path in _folder(run_dir).glob("*.json") if REPORT.fullmatch(path.name)]
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in found}


def keep_reports(run_dir: Path, reports: Mapping[str, Any]) -> None:
    """Add what `read_reports` has found on another machine, if the folder can be written."""
    for name, report in reports.items():
        if REPORT.fullmatch(name):
            with contextlib.suppress(OSError, UserError):
                write_json(_folder(run_dir) / name, report)


def _killed_rank(run_dir: Path, by_kernel: bool) -> Report | None:
    """A rank that was ended by a signal other than `STOPS`."""
    for path in _folder(run_dir).glob("exit-codes-*.json"):
        for end in json.loads(path.read_text(encoding="utf-8")):
            rank, gpu, code, killed_by_kernel = Exit(**end)
            if code < 0 and -code not in STOPS:
                return Report.now(*_signal(-code, by_kernel or killed_by_kernel), rank, gpu)
    return None


def _signal(number: int, by_kernel: bool) -> tuple[Kind, str]:
    """The kind and the message of a death by signal."""
    if number == signal.SIGKILL and by_kernel:
        return "out of memory", "killed by the kernel: the machine ran out of memory"
    return "crash", f"killed by {signal.Signals(number).name}"


def _reports(run_dir: Path, pattern: str) -> Iterator[Report]:
    for path in _folder(run_dir).glob(pattern):
        yield Report(**json.loads(path.read_text(encoding="utf-8")))


def first_cause(reports: Iterable[Report]) -> Report | None:
    """The earliest report, of those that tell more than a crash if there are any; None of none.

    Clocks differ, and what breaks elsewhere is a crash for all others.
    """
    return min(reports, key=lambda report: (report.kind == "crash", report.time), default=None)


def explain(
    run_dir: Path, exit_code: int, *, by_kernel: bool = False
) -> TrainingFailure | UserError:
    """The failure behind a nonzero `exit_code` of the process that the launcher started.

    `by_kernel` says whether the kernel's OOM killer has killed processes meanwhile. What a launcher
    on a Ray cluster reported is the cause. Otherwise a killed rank takes precedence over the
    others' reports, since their connections break before the agent sees the death.
    """
    cause = (
        next(_reports(run_dir, "launcher.json"), None)
        or _killed_rank(run_dir, by_kernel)
        or first_cause(_reports(run_dir, "rank-*.json"))
    )
    if cause is None:
        return _explain_code(exit_code, by_kernel)
    return cause.as_error()


def _explain_code(code: int, by_kernel: bool) -> TrainingFailure:
    """The failure where no rank wrote a report: it died too early, or of a signal."""
    number = -code if code < 0 else code - 128
    if number in STOPS:
        return Preempted(f"{signal.Signals(number).name} received before training started")
    if code < 0:
        kind, message = _signal(-code, by_kernel)
        return _TYPES[kind](message)
    return Crashed(f"exit code {code}; see the logs folder of the run")
