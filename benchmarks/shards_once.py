"""Run by `benchmarks.tokenize` to measure time and memory of making shards from scratch.

Prints one line of JSON: the seconds from text in Parquet to finished, checksummed shards, and the
peak memory in bytes, including mapped files (Linux; null elsewhere).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from infini_model.config import DataConfig
from infini_model.data.shards.dataset import build_dataset
from infini_model.data.sources.download import download


def text_to_shards(corpus: Path, spec: str, folder: Path, pattern: str = "*.parquet") -> None:
    """Make shards of the files in `corpus` with this project's pipeline, in `folder`."""
    config = DataConfig.model_validate(
        {
            "source": {"paths": [str(corpus / pattern)]},
            "tokenizer": {"spec": spec},
        }
    )
    build_dataset(download(config, folder), config, folder)


def main(warm_up: str, corpus: str, spec: str, folder: str) -> None:
    """Make the shards of a small corpus first, to exclude the time of imports."""
    text_to_shards(Path(warm_up), spec, Path(folder) / "warm-up")
    began = time.perf_counter()
    text_to_shards(Path(corpus), spec, Path(folder) / "measured")
    print(json.dumps({"seconds": time.perf_counter() - began, "peak_bytes": peak_bytes()}))


def peak_bytes() -> int | None:
    """Peak memory of this process; `wait4` would report at least the parent's own peak."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
