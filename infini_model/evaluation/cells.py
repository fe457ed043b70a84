"""Finished parts of a task, kept in the run folder, so that an interrupted evaluation resumes.

A cell is a measurement of its own, such as the answers at one length and depth. Its result is the
file `evaluation/<task>-<key>/<cell>.json`, where the key is of all that decides the results. A
repeated evaluation reads it as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infini_model.runtime.storage import write_json


class Cells:
    """The cells of a task in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def measured(self, cell: str, measure: Callable[[], Any]) -> Any:
        """The kept result of `cell`, or that of `measure`, which is kept: a tree of JSON values.

        Raises `UserError` if the disk is full.
        """
        path = self._folder / f"{cell}.json"
        if not path.exists():
            result = measure()
            self._folder.mkdir(parents=True, exist_ok=True)
            write_json(path, result)
        # What is read is the same at the first evaluation and at later ones: tuples are lists.
        return json.loads(path.read_text(encoding="utf-8"))
