"""Pictures on the pages of Prefect's server, which draw what has an address, but no data.

The server shows the files of one folder. Each is named after its content, which nobody guesses:
a page that shows an image can send no secret with it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from infini_model.runtime.storage import atomic_file, sha256

# Environment variable of the server and of its clients on this machine: the folder.
FOLDER = "INFINI_PICTURES"
# Where the server shows it; without host and port, which may change.
ADDRESS = "/pictures"


def publish(picture: Path) -> str | None:
    """Copy a PNG image into the folder; returns its address, None if no server shows the folder.

    Raises `UserError` if it cannot be written, `OSError` if the image cannot be read.
    """
    folder = os.environ.get(FOLDER)
    if folder is None:
        return None
    name = f"{sha256(picture)}.png"
    with atomic_file(Path(folder) / name) as temporary:
        shutil.copyfile(picture, temporary)
    return f"{ADDRESS}/{name}"
