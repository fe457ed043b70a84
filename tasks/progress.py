"""How far a stage is: an artifact in Prefect, a bar on a terminal, lines in a log file."""

from __future__ import annotations

import logging
import time
from types import TracebackType
from typing import cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.logging import get_run_logger
from prefect.logging.handlers import PrefectConsoleHandler
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.theme import Theme

ARTIFACT_SECONDS = 1.0
LOG_SECONDS = 5.0
# After Prefect did not take it: this many times as long as the attempt took.
PAUSE = 10.0


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
        self._artifact: UUID | None = None
        self._told = self._wrote = self._silent_until = float("-inf")

    def __enter__(self) -> Progress:
        if self._console is not None:
            # Prefect's console knows the styles of its log alone, none of a bar's.
            self._console.push_theme(Theme())
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
        if self._console is not None:
            self._console.pop_theme()

    def show(self, done: int, total: int) -> None:
        """Tell of `done` of `total`; the last one is always shown."""
        self._bar.update(self._task, completed=done, total=total)
        now, last = time.monotonic(), done >= total
        percent = 100.0 * done / total if total else 100.0
        if now >= self._silent_until and (last or now - self._told >= ARTIFACT_SECONDS):
            self._told = now
            self._try_to_tell(percent)
        if self._logged and (last or now - self._wrote >= LOG_SECONDS):
            self._wrote = now
            get_run_logger().info("%.0f%% of %s %s", percent, f"{total:,}", self._unit)

    def _try_to_tell(self, percent: float) -> None:
        """Tell Prefect, if it listens: its server may be down for a while, the stage goes on."""
        try:
            self._tell(percent)
        except Exception as error:  # noqa: BLE001 - no display may harm a stage
            now = time.monotonic()
            self._silent_until = now + PAUSE * (now - self._told)
            get_run_logger().warning("Prefect takes no progress (%s); the stage goes on", error)

    def _tell(self, percent: float) -> None:
        if self._artifact is None:
            key, description = f"{self._name}-progress", f"{self._name}, of {self._unit}"
            # Typed as perhaps a coroutine; in a task that is not async it is none.
            self._artifact = cast(
                "UUID", create_progress_artifact(percent, key=key, description=description)
            )
        else:
            update_progress_artifact(self._artifact, percent)
