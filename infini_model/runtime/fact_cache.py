"""Facts that are expensive to find and cheap to recognise again, kept in a file between runs."""

from __future__ import annotations

import json
import logging
import time
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from infini_model.runtime import storage
from infini_model.runtime.errors import UserError

log = logging.getLogger(__name__)

DAY_SECONDS = 86_400
# A fact that no run has used for this long is dropped, so that the file does not grow for ever.
KEEP_DAYS = 60


class FactCache:
    """Facts (JSON values) by key in the file `path`; losing the file costs time and nothing else.

    The file is read when a fact is first asked for. `save` merges the new facts into it, whatever
    other processes and machines have saved in the meantime.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._today = int(time.time() // DAY_SECONDS)
        self._new: dict[str, list[Any]] = {}

    @cached_property
    def _facts(self) -> dict[str, list[Any]]:
        return _read(self._path)

    def get(self, key: str) -> Any | None:
        value, day = self._new.get(key) or self._facts.get(key) or (None, 0)
        if value is not None and day < self._today:
            self.put(key, value)
        return value

    def put(self, key: str, value: Any) -> None:
        """Remember a fact, from the next `save` on also for other processes."""
        self._new[key] = [value, self._today]

    def save(self) -> None:
        """Write the new facts to the file; where that is impossible they are found again later."""
        new, self._new = self._new, {}
        if not new:
            return
        try:
            with storage.lock(self._path.with_suffix(".lock")):
                storage.remove_leftovers(self._path.parent, self._path.name)
                facts = _read(self._path) | new
                oldest = self._today - KEEP_DAYS
                self._facts = {key: fact for key, fact in facts.items() if fact[1] >= oldest}
                with storage.atomic_file(self._path) as temporary:
                    temporary.write_text(json.dumps(self._facts), encoding="utf-8")
        except UserError as error:
            log.info("not remembered for the next run: %s", error)
            self._facts |= new


@cache
def fact_cache(folder: Path) -> FactCache:
    """Open the facts about files that all machines which see a `folder` keep in it."""
    return FactCache(folder / ".facts.json")


def _read(path: Path) -> dict[str, list[Any]]:
    """The facts of a file; none if it is missing or damaged."""
    try:
        # Two thirds of the time that `json` takes.
        facts = from_json(path.read_bytes(), cache_strings="none")
        return facts if isinstance(facts, dict) else {}
    except (OSError, ValueError):
        return {}
