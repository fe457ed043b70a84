"""A stage's progress: an artifact in Prefect, a bar on a terminal, lines in a log file."""

from __future__ import annotations

import contextlib
import logging
import time

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
    """The console that Prefect logs to, if it is a terminal: a bar shares it with the log."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler) and handler.console.is_terminal:
            return handler.console
    return None


class Progress:
    """Shows `done` of `total`, in `unit`, while the block runs.

    Prefect's artifact is updated at most once a second. Pass `logged=False` where the log shows the
    progress already.
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
        self._percent = self._sent = -1.0
        self._logged_at = float("-inf")
        self._shown = contextlib.ExitStack()

    def __enter__(self) -> Progress:
        if self._console is not None:
            # Prefect's console has only the styles of its log, none for a bar.
            self._console.push_theme(Theme())
            self._shown.callback(self._console.pop_theme)
        with contextlib.suppress(OSError):  # The terminal may have been closed.
            self._bar.start()
        self._shown.callback(self._stop_bar)
        self._shown.enter_context(self._updates)
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()

    def _stop_bar(self) -> None:
        with contextlib.suppress(OSError):
            self._bar.stop()

    def show(self, done: int, total: int) -> None:
        """Show that `done` of `total` units are done; the last call always reaches Prefect."""
        self._bar.update(self._task, completed=done, total=total)
        now = time.monotonic()
        self._percent = 100.0 * done / total if total else 100.0
        if self._logged and (done >= total or now - self._logged_at >= LOG_SECONDS):
            self._logged_at = now
            get_run_logger().info("%.0f%% of %s %s", self._percent, f"{total:,}", self._unit)

    def _update(self) -> None:
        """Update the artifact if the percentage, rounded down, has changed."""
        percent = float(int(self._percent))
        if percent == self._sent:
            return
        description = f"{self._name}: percent of all {self._unit}"
        self._artifact.show(ProgressArtifact(progress=percent, description=description))
        self._sent = percent
