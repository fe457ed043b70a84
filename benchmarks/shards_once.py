"""What `tokenize` runs to see how fast and in how much memory shards are made, from nothing.

It prints one line of JSON: the seconds from text in Parquet to finished, checksummed shards, and
the most memory that it had, in bytes, mapped files counted in (Linux; null elsewhere).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from infini_model.config import DataConfig
from infini_model.data.shards.dataset import build_dataset
from infini_model.data.sources.download import download


def text_to_shards(corpus: Path, spec: str, folder: Path) -> None:
    """Make the shards of the Parquet files below `corpus` by this project's path, in `folder`."""
    config = DataConfig.model_validate(
        {
            "source": {"paths": [str(corpus / "*.parquet")]},
            "tokenizer": {"spec": spec},
        }
    )
    build_dataset(download(config, folder), config, folder)


def main(warm_up: str, corpus: str, spec: str, folder: str) -> None:
    """Make the shards of a small corpus first: importing libraries is not what is measured."""
    text_to_shards(Path(warm_up), spec, Path(folder) / "warm-up")
    began = time.perf_counter()
    text_to_shards(Path(corpus), spec, Path(folder) / "measured")
    print(json.dumps({"seconds": time.perf_counter() - began, "peak_bytes": peak_bytes()}))


def peak_bytes() -> int | None:
    """Of this process: what `wait4` tells its parent is never less than what the parent had."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
