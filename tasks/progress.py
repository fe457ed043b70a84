"""How far a stage is: an artifact in Prefect, a bar on a terminal, lines in a log file."""

from __future__ import annotations

import contextlib
import logging
import time
from types import TracebackType

from prefect.artifacts import ProgressArtifact
from prefect.logging import get_run_logger
from prefect.logging.handlers import PrefectConsoleHandler
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.theme import Theme

from tasks.artifacts import LiveArtifact, Updates

ARTIFACT_SECONDS = 1.0
LOG_SECONDS = 5.0


def _terminal() -> Console | None:
    """The console that Prefect logs to, if a person watches: a bar has to share it with the log."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler) and handler.console.is_terminal:
            return handler.console
    return None


class Progress:
    """Shows `done` of `total`, in `unit`, while the block runs.

    Prefect is told once a second at most. `logged` is false where the log tells already.
    """

    def __init__(self, name: str, unit: str, *, logged: bool = True) -> None:
        self._console = console = _terminal()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn(unit),
            TimeRemainingColumn(),
        )
        self._bar = Bar(*columns, console=console, disable=console is None, transient=True)
        self._task = self._bar.add_task(name, total=None)
        self._logged = logged and console is None
        self._name, self._unit = name, unit
        self._artifact = LiveArtifact(f"{name}-progress")
        self._updates = Updates("progress", self._update, ARTIFACT_SECONDS)
        self._percent = self._told = -1.0
        self._wrote = float("-inf")

    def __enter__(self) -> Progress:
        if self._console is not None:
            # Prefect's console knows the styles of its log alone, none of a bar's.
            self._console.push_theme(Theme())
        with contextlib.suppress(OSError):  # The terminal may have been closed.
            self._bar.start()
        self._updates.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._updates.__exit__(kind, error, trace)
        with contextlib.suppress(OSError):
            self._bar.stop()
        if self._console is not None:
            self._console.pop_theme()

    def show(self, done: int, total: int) -> None:
        """Tell of `done` of `total`; the last one is always shown."""
        self._bar.update(self._task, completed=done, total=total)
        now = time.monotonic()
        self._percent = 100.0 * done / total if total else 100.0
        if self._logged and (done >= total or now - self._wrote >= LOG_SECONDS):
            self._wrote = now
            get_run_logger().info("%.0f%% of %s %s", self._percent, f"{total:,}", self._unit)

    def _update(self) -> None:
        """Tell Prefect, if there is something new to tell."""
        percent = self._percent
        if percent == self._told:
            return
        description = f"{self._name}, of {self._unit}"
        self._artifact.show(ProgressArtifact(progress=percent, description=description))
        self._told = percent
