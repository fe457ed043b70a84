"""Folders for work in progress, which do not outlive the process that works in them for long."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from infini_model.runtime import storage


@contextlib.contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A new folder in `parent`, which holds its own lock only; removed at the end.

    What killed processes left in `parent` is removed too: the kernel releases their locks. Raises
    `UserError` if the folder cannot be made.
    """
    with contextlib.ExitStack() as stack:
        with storage.lock(_lock_of(parent)):
            for left in parent.glob(f"{storage.TEMPORARY}*"):
                if not storage.is_locked(_lock_of(left)):
                    shutil.rmtree(left, ignore_errors=True)
            with storage.named_os_errors(parent):
                folder = Path(tempfile.mkdtemp(prefix=storage.TEMPORARY, dir=parent))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.enter_context(storage.lock(_lock_of(folder)))
        yield folder


def _lock_of(folder: Path) -> Path:
    return folder / ".lock"
