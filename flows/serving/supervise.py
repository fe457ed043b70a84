"""Supervision of a service: it is restarted after each exit, with increasing delays."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from flows.serving.services import Service
from infini_model.runtime.errors import UserError

FIRST_DELAY_SECONDS = 1.0
LONGEST_DELAY_SECONDS = 30.0
# Exits within this time after which the service is considered broken.
MOST_EXITS = 5
WITHIN_SECONDS = 300.0


class Supervised:
    """A service that `start` starts now and restarts after each exit.

    Attributes:
        service: The most recently started process.
    """

    def __init__(
        self,
        start: Callable[[], Service],
        needs: Callable[[], bool] = lambda: True,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`needs` returns whether the service's dependencies are up; a restart waits for them."""
        self._start, self._needs, self._clock = start, needs, clock
        self.service = start()
        self._exits: deque[float] = deque()
        self._due: float | None = None

    def close(self) -> None:
        self.service.close()

    def check(self, say: Callable[[str], None]) -> None:
        """Restart the service if it has exited and its delay has passed.

        Raises `UserError` in one line when it exits too often.
        """
        status, now = self.service.process.poll(), self._clock()
        if status is None:
            return
        if self._due is None:
            delay = self._note_exit(now)
            self._due = now + delay
            say(f"{self.service.name} has exited ({status}); restarting it in {delay:g} s")
        if now >= self._due and self._needs():
            self._due = None
            self.service = self._start()

    def _note_exit(self, now: float) -> float:
        """Seconds until the next start."""
        self._exits.append(now)
        while now - self._exits[0] > WITHIN_SECONDS:
            self._exits.popleft()
        if len(self._exits) >= MOST_EXITS:
            raise UserError(
                f"{self.service.name} has exited {MOST_EXITS} times within "
                f"{WITHIN_SECONDS / 60:g} minutes; see {self.service.log}"
            )
        return min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** (len(self._exits) - 1))
