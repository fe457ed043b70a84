"""Small documents and models, and expensive read-only fixtures for all pytest workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from infini_model.runtime.storage import lock

WORDS = ("river", "stone", "light", "under", "seven", "quiet", "glass", "morning", "copper")
# A model that trains in seconds.
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "segment_length": 16,
}


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name`, as `make` has filled it in this process or another worker's.

    A worker that finds it half made, by one that failed, makes it again in a new folder.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        folder = factory.mktemp(name)
        make(folder)
        return folder
    shared = factory.getbasetemp().parent
    done = shared / f"{name}.done"
    with lock(shared / f"{name}.lock"):
        if not done.is_file():
            folder = factory.mktemp(name)
            make(folder)
            done.write_text(str(folder))
    return Path(done.read_text())
