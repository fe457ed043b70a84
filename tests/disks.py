"""Disks that fill up or turn read-only: they are mounted, and whoever may not mount is told so."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = " ".join(done.stderr.split())
        pytest.fail(f"needs the right to mount: be root, with CAP_SYS_ADMIN ({reason})", False)


@contextlib.contextmanager
def small(folder: Path) -> Iterator[None]:
    """Make `folder`, with room for 1 MiB."""
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextlib.contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """Make `folder` read-only, even for root."""
    place = str(folder)
    _mount("--bind", place, place)
    try:
        _mount("-o", "remount,ro,bind", place)
        yield
    finally:
        subprocess.run(["umount", place], check=True)
