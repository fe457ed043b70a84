"""Disks that fill up or turn read-only."""

from __future__ import annotations

import contextlib
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class SmallDisk:
    """A folder with room for 1 MiB, or, where mounting is not allowed, for files of 256 KiB.

    `limits` are options of `subprocess.run` for the commands that are to see it as such.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.limits: dict[str, Any] = {}
        folder.mkdir()
        self.mounted = self._mount("size=1m")
        if not self.mounted:
            size = (1 << 18, 1 << 18)
            self.limits["preexec_fn"] = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, size)

    def _mount(self, options: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)]
        with contextlib.suppress(FileNotFoundError):
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        return False

    def grow(self) -> None:
        """Free space."""
        self.limits.clear()
        assert not self.mounted or self._mount("remount,size=64m")

    def close(self) -> None:
        """Release the disk."""
        if self.mounted:
            subprocess.run(["umount", str(self.folder)], check=True)


@contextlib.contextmanager
def frozen(folder: Path) -> Iterator[bool]:
    """Make `folder` read-only, even for root; yields False where that is not allowed."""

    def mount(*arguments: str) -> bool:
        return (
            subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0
        )

    place = str(folder)
    done = mount("--bind", place, place) and mount("-o", "remount,ro,bind", place)
    try:
        yield done
    finally:
        subprocess.run(["umount", place], capture_output=True, check=False)
