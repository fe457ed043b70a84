"""Processes that are kept up: what dies is started again, with longer and longer delays."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from flows.serving.services import Service
from infini_model.runtime.errors import UserError

FIRST_DELAY_SECONDS = 1.0
LONGEST_DELAY_SECONDS = 30.0
# So many deaths within so many seconds, and it is given up.
MOST_DEATHS = 5
WITHIN_SECONDS = 300.0


class Supervised:
    """A service that is kept up by `start`, which is called now and again after each death.

    Attributes:
        service: The process that was started last.
    """

    def __init__(
        self, start: Callable[[], Service], needs: Callable[[], bool] = lambda: True
    ) -> None:
        """`needs` says whether what the service depends on is up; a restart waits for it."""
        self._start, self._needs = start, needs
        self.service = start()
        self._deaths: deque[float] = deque()
        self._due: float | None = None

    def close(self) -> None:
        """End the service."""
        self.service.close()

    def look(self, say: Callable[[str], None]) -> None:
        """Start the service again if it has died, once its delay has passed.

        Raises `UserError` in one line when it dies again and again.
        """
        status, now = self.service.process.poll(), time.monotonic()
        if status is None:
            return
        if self._due is None:
            delay = self._note_death(now)
            self._due = now + delay
            say(f"{self.service.name} has ended ({status}); restarting it in {delay:g} s")
        if now >= self._due and self._needs():
            self._due = None
            self.service = self._start()

    def _note_death(self, now: float) -> float:
        """Seconds until the next start."""
        self._deaths.append(now)
        while now - self._deaths[0] > WITHIN_SECONDS:
            self._deaths.popleft()
        if len(self._deaths) >= MOST_DEATHS:
            raise UserError(
                f"{self.service.name} has ended {MOST_DEATHS} times within "
                f"{WITHIN_SECONDS / 60:g} minutes; see {self.service.log}"
            )
        return min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** (len(self._deaths) - 1))
