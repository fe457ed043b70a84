"""Results of trainings that take hours in all: a file with a line of JSON for each finished run."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from infini_model.runtime.machine import available_cores

Trial = TypeVar("Trial", bound=NamedTuple)


class FinishedRuns(Generic[Trial]):
    """The finished runs of a file, by trial: a named tuple, whose fields are in the line.

    A field that a line lacks has its default.

    Runs are compared only with those of the same key, which is of their common settings and data.
    """

    def __init__(self, path: Path, kind: type[Trial]) -> None:
        self._path, self._kind, self._lock = path, kind, threading.Lock()
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._lines: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def keys(self) -> list[str]:
        """The keys, in the order of their first runs."""
        return list(dict.fromkeys(line["key"] for line in self._lines))

    def of(self, key: str) -> dict[Trial, dict[str, Any]]:
        """The results with this key."""
        return {
            self._kind(**{name: line[name] for name in self._kind._fields if name in line}): line
            for line in self._lines
            if line["key"] == key
        }

    def complete(
        self, key: str, trials: Iterable[Trial], perform: Callable[[Trial], dict[str, Any]]
    ) -> None:
        """Perform the trials that are not in the file, as many at once as there are cores.

        If one fails, the others are performed all the same.
        """

        def finish(trial: Trial) -> None:
            line = {**trial._asdict(), "key": key, **perform(trial)}
            with self._lock, self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                self._lines.append(line)

        done = self.of(key)
        with ThreadPoolExecutor(available_cores()) as pool:
            jobs = [pool.submit(finish, trial) for trial in trials if trial not in done]
        for job in jobs:
            job.result()
