"""What a dataset costs when its source has changed a little, or not at all.

A few Parquet files, of several partitions each, are tokenised with a BPE: a first pass over all but
one, then the same source unchanged, with the last file as well, without the first, with one of
other content, and with all renamed. Then a source of many small text files without changes. Each
case runs the stages download, plan and, unless all stands, shard in a process of its own, from the
state that the case before left; imports are not timed.

"MB read" counts text, shards and records, checksums included (Linux).
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from benchmarks.corpus import documents_of_size, write_parquet
from benchmarks.report import Cell, Ratio, cpu_seconds, publish, run, spread, take_turns
from infini_model.__main__ import OBJECTS_BETWEEN_COLLECTIONS, STAGES
from infini_model.config import Config, load_config
from infini_model.data.sources.files import SETTLED_NANOSECONDS
from infini_model.data.tokenizers.bpe import train_tokenizer

FIRST, NOTHING, MORE = "first pass", "nothing new", "one file more"
LESS, CHANGED, RENAMED = "one file less", "one file changed", "all renamed"
SHARE = f"{MORE}, of the partitions"
# As files of 120 MB are in partitions of the default size.
PARTITION_MEGABYTES = 8
ROWS_OF_A_GROUP = 20
VOCAB_SIZE = 8192
IO = Path("/proc/self/io")


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.incremental",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--megabytes", type=float, default=30.0, help="text of a Parquet file")
    parser.add_argument("--small-files", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--stages", type=Path, metavar="FILE", help="only run those of this config")
    return parser.parse_args()


class Ran(NamedTuple):
    """What the stages did: partitions made and reused, time, and bytes read (None but on Linux)."""

    made: int
    reused: int
    seconds: float
    cpu_seconds: float
    read_bytes: int | None


def read_bytes() -> int | None:
    """The bytes that this process has read, the page cache included (Linux; None elsewhere)."""
    if not IO.exists():
        return None
    lines = dict(line.split(": ") for line in IO.read_text().splitlines())
    return int(lines["rchar"])


def print_stages(file: Path) -> None:
    """Run the stages here, one after another, and print `Ran` as a line of JSON."""
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    config = load_config(file=file)
    importlib.import_module("infini_model.data.sources.listing")
    importlib.import_module("infini_model.data.build")
    importlib.import_module("pyarrow.parquet")
    pa.array([0])  # for the first array Arrow imports pandas, where that is installed
    began, cpu_began, bytes_began = time.perf_counter(), cpu_seconds(), read_bytes()
    listing = STAGES["download"](config, argparse.Namespace())["listing"]
    listed = argparse.Namespace(listing=Path(listing))
    plan = STAGES["plan"](config, listed)
    if not plan["intact"]:
        STAGES["shard"](config, listed)
    ran = Ran(
        made=plan["new"],
        reused=plan["reused"],
        seconds=time.perf_counter() - began,
        cpu_seconds=cpu_seconds() - cpu_began,
        read_bytes=bytes_began and (read_bytes() or 0) - bytes_began,
    )
    print(json.dumps(ran._asdict()))


def run_stages(config: Path) -> Ran:
    """Run the stages in a fresh process."""
    stages = ["-m", "benchmarks.incremental", "--stages", str(config)]
    return Ran(**json.loads(run(stages).last_line))


class Growing:
    """A source of Parquet files that changes from case to case, and its dataset, in one folder."""

    def __init__(self, folder: Path, files: int, megabytes: float) -> None:
        self._kept, self._source = folder / "kept", folder / "source"
        self._datasets = folder / "datasets"
        self._config = write_config(folder, self._source / "*.parquet", str(folder))
        self._kept.mkdir(parents=True)
        texts = itertools.islice(documents_of_size(megabytes * 1e6), files + 1)
        for number, each in enumerate(texts):
            if not number:
                train_tokenizer([each], VOCAB_SIZE).save(folder)
            write_parquet(self._kept / f"{number:03d}.parquet", each, ROWS_OF_A_GROUP)
        self._names = sorted(path.name for path in self._kept.iterdir())
        self.ran: dict[str, list[Ran]] = {}

    def cases(self) -> dict[str, Callable[[], float]]:
        """The cases for `take_turns`, each from the state that the one before left."""
        more, other = self._names[-2:]
        changes = {
            FIRST: self._start,
            NOTHING: lambda: None,
            MORE: lambda: self._copy(more, more),
            LESS: (self._source / self._names[0]).unlink,
            CHANGED: lambda: self._copy(other, self._names[1]),
            RENAMED: self._rename,
        }
        return {name: partial(self._run, name, change) for name, change in changes.items()}

    def _run(self, name: str, change: Callable[[], None]) -> float:
        change()
        if name not in (NOTHING, LESS):
            wait_until_settled()
        ran = run_stages(self._config)
        self.ran.setdefault(name, []).append(ran)
        return ran.seconds

    def _start(self) -> None:
        for folder in (self._source, self._datasets):
            shutil.rmtree(folder, ignore_errors=True)
        self._source.mkdir()
        for name in self._names[:-2]:
            self._copy(name, name)

    def _copy(self, name: str, to: str) -> None:
        shutil.copyfile(self._kept / name, self._source / to)

    def _rename(self) -> None:
        for path in sorted(self._source.iterdir()):
            path.rename(path.with_name(f"renamed-{path.name}"))


def write_config(folder: Path, paths: Path, tokenizer: str = "bytes") -> Path:
    """Write a configuration that makes `paths` a dataset in `folder`; returns its file."""
    config = Config.model_validate(
        {
            "run": {"output_dir": str(folder)},
            "data": {
                "source": {"paths": [str(paths)]},
                "tokenizer": {"spec": tokenizer},
                "partition_megabytes": PARTITION_MEGABYTES,
            },
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.json"
    file.write_text(config.model_dump_json(), encoding="utf-8")
    return file


def wait_until_settled() -> None:
    """Wait until the files that were just written are old enough for their checksums to be kept."""
    time.sleep(1.1e-9 * SETTLED_NANOSECONDS)


def small_files(folder: Path, count: int, turns: int) -> list[Ran]:
    """The stages on small text files, of which all stand."""
    source = folder / "source"
    source.mkdir(parents=True)
    for number in range(count):
        (source / f"{number:06d}.txt").write_text(f"Text of file {number}.\n" * 50)
    config = write_config(folder, source / "*.txt")
    wait_until_settled()
    run_stages(config)
    ran = [run_stages(config) for _ in range(turns)]
    assert not any(each.made for each in ran), "partitions are new in a source without changes"
    return ran


def row(name: str, ran: list[Ran], first: list[Ran] | None = None) -> dict[str, Cell]:
    """A row of the table."""
    last = ran[-1]
    return {
        "": name,
        "partitions made": last.made,
        "reused": last.reused,
        "seconds": spread([each.seconds for each in ran]),
        "of the first pass": first and relative(ran, first),
        "CPU s": statistics.median(each.cpu_seconds for each in ran),
        "MB read": last.read_bytes and last.read_bytes / 1e6,
    }


def relative(ran: list[Ran], first: list[Ran]) -> Ratio:
    """The seconds of a case relative to those of the first pass."""
    return spread([a.seconds / b.seconds for a, b in zip(ran, first, strict=True)])


def main() -> None:
    """Measure and print the results."""
    options = parse()
    if options.stages:
        print_stages(options.stages)
        return
    with tempfile.TemporaryDirectory() as name:
        growing = Growing(Path(name) / "files", options.files, options.megabytes)
        take_turns(growing.cases(), options.turns)
        standing = small_files(Path(name) / "small", options.small_files, options.turns)
    ran = growing.ran
    first = ran.pop(FIRST)
    small = f"{options.small_files:,} small files, nothing new"
    rows = [row(FIRST, first), *(row(case, each, first) for case, each in ran.items())]
    ratios = {case: relative(each, first) for case, each in ran.items()}
    ratios[SHARE] = spread([each.made / (each.made + each.reused) for each in ran[MORE]])
    ratios[f"seconds for {small}"] = spread([each.seconds for each in standing])
    publish(
        "incremental",
        f"A source that changes: {options.files} Parquet files of {options.megabytes:g} MB of text",
        [*rows, row(small, standing)],
        ratios,
        limits={MORE: 0.15, SHARE: 1 / options.files, f"seconds for {small}": 1},
    )


if __name__ == "__main__":
    main()
