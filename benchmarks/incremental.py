"""What a dataset costs when its source has changed a little, or not at all.

`files` are Parquet files of several partitions each, tokenised with a BPE: a first pass over all
but one, then the same source unchanged, with the last file as well, without the first, with one of
other content, and with all renamed. `gathered` are as many files that are smaller than a partition,
so that a file more makes its group again. Each case runs the stages download, plan and shard in a
process of its own, from the state that the case before left; imports are not timed.

Then the stages run on sources without changes, by themselves and as the preprocess flow runs them,
a process each with its imports: many small text files, and as many partitions as a corpus of
terabytes has, which stand in their records alone (see `benchmarks.synthetic`).

"MB read" counts text and shards, checksums included, but no records.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.corpus import documents_of_size, write_parquet
from benchmarks.report import Cell, Ratio, publish, run, spread, take_turns
from benchmarks.stages_once import Ran
from benchmarks.synthetic import write_dataset, write_source
from infini_model.config import Config
from infini_model.data.sources.fingerprints import SETTLED_NANOSECONDS
from infini_model.data.tokenizers.bpe import train_tokenizer

FIRST, NOTHING, MORE = "first pass", "nothing new", "one file more"
LESS, CHANGED, RENAMED = "one file less", "one file changed", "all renamed"
ROWS_OF_A_GROUP = 20
VOCAB_SIZE = 8192


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
    parser.add_argument("--partitions", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=3)
    return parser.parse_args()


class Growing:
    """A source of Parquet files that changes from case to case, and its dataset, in one folder."""

    def __init__(
        self, folder: Path, files: int, megabytes: float, partition_megabytes: int
    ) -> None:
        self._kept, self._source = folder / "kept", folder / "source"
        self._datasets = folder / "datasets"
        self._config = write_config(
            folder, self._source / "*.parquet", partition_megabytes, str(folder)
        )
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
        wait_until_settled()
        ran = run_stages(self._config, "in-one-process")
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


def write_config(
    folder: Path, paths: Path, partition_megabytes: int, tokenizer: str = "bytes"
) -> Path:
    """Write a configuration that makes `paths` a dataset in `folder`; returns its file."""
    config = Config.model_validate(
        {
            "run": {"output_dir": str(folder)},
            "data": {
                "source": {"paths": [str(paths)]},
                "tokenizer": {"spec": tokenizer},
                "partition_megabytes": partition_megabytes,
            },
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.json"
    file.write_text(config.model_dump_json(), encoding="utf-8")
    return file


def run_stages(config: Path, how: str) -> Ran:
    """Run the stages in a fresh process."""
    return Ran(**json.loads(run(["-m", "benchmarks.stages_once", str(config), how]).last_line))


def wait_until_settled() -> None:
    """Wait until the files that were just written are old enough for their checksums to be kept."""
    time.sleep(1.1e-9 * SETTLED_NANOSECONDS)


def grow(
    name: str, folder: Path, options: argparse.Namespace, partition_megabytes: int
) -> tuple[list[dict[str, Cell]], dict[str, Ratio]]:
    """A row per case, the seconds of each relative to the first pass, and the share made anew."""
    growing = Growing(folder, options.files, options.megabytes, partition_megabytes)
    seconds = take_turns(growing.cases(), options.turns)
    first = seconds[FIRST]
    ratios = {
        case: spread([one / all_ for one, all_ in zip(times, first, strict=True)])
        for case, times in seconds.items()
        if case != FIRST
    }
    rows = [row(f"{name}, {case}", growing.ran[case], ratios.get(case)) for case in seconds]
    named = {f"{name}, {case}": ratio for case, ratio in ratios.items()}
    shares = [each.made / (each.made + each.reused) for each in growing.ran[MORE]]
    return rows, named | {f"{name}, {MORE}, of the partitions": spread(shares)}


def row(name: str, ran: list[Ran], ratio: Ratio | None = None) -> dict[str, Cell]:
    """A row of the table."""
    last = ran[-1]
    read = None if last.content_bytes is None else last.content_bytes / 1e6
    return {
        "": name,
        "partitions made": last.made,
        "reused": last.reused,
        "seconds": spread([each.seconds for each in ran]),
        "of the first pass": ratio,
        "CPU s": statistics.median(each.cpu_seconds for each in ran),
        "MB read": read,
    }


def unchanged(
    name: str, config: Path, turns: int
) -> tuple[list[dict[str, Cell]], dict[str, Ratio]]:
    """Rows of a source without changes: the stages by themselves, and as the flow runs them."""
    ran: dict[str, list[Ran]] = {}

    def measure(how: str) -> float:
        ran.setdefault(how, []).append(run_stages(config, how))
        return ran[how][-1].seconds

    ways = ("in-one-process", "as-a-flow")
    take_turns({how: partial(measure, how) for how in ways}, turns)
    for each in itertools.chain(*ran.values()):
        if each.made:
            raise SystemExit(f"{name}: {each.made} partitions are new in a source without changes")
    rows = [row(f"{name}, {how.replace('-', ' ')}", times) for how, times in ran.items()]
    seconds = {
        f"seconds for {name}, {how.replace('-', ' ')}": spread([each.seconds for each in times])
        for how, times in ran.items()
    }
    return rows, seconds


def small_files(folder: Path, count: int) -> Path:
    """A finished dataset of small text files; returns its configuration."""
    source = folder / "source"
    source.mkdir(parents=True)
    for number in range(count):
        (source / f"{number:06d}.txt").write_text(f"Text of file {number}.\n" * 50)
    config = write_config(folder, source / "*.txt", 32)
    wait_until_settled()
    run_stages(config, "as-a-flow")
    return config


def many_partitions(folder: Path, count: int) -> Path:
    """A finished dataset of records alone; returns its configuration."""
    file = write_config(folder, folder / "source/*.jsonl", 32)
    config = Config.model_validate_json(file.read_bytes())
    write_source(folder / "source", config, count)
    write_dataset(config)
    return file


def main() -> None:
    """Measure and print the results."""
    options = parse()
    limits: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # As files of 120 MB are in partitions of the default size.
        rows, ratios = grow("files", folder / "files", options, 8)
        limits |= {
            f"files, {MORE}": 0.15,
            f"files, {MORE}, of the partitions": 1.0 / options.files,
        }
        more_rows, more = grow(
            "gathered", folder / "gathered", options, math.ceil(3 * options.megabytes)
        )
        rows, ratios = rows + more_rows, ratios | more
        for what, config, seconds in (
            (
                f"{options.small_files:,} files",
                small_files(folder / "small", options.small_files),
                1,
            ),
            (
                f"{options.partitions:,} partitions",
                many_partitions(folder / "many", options.partitions),
                5,
            ),
        ):
            more_rows, more = unchanged(what, config, options.turns)
            rows, ratios = rows + more_rows, ratios | more
            limits |= dict.fromkeys(more, seconds)
    heading = (
        f"A source that changes: {options.files} Parquet files of {options.megabytes:g} MB of text"
    )
    publish("incremental", heading, rows, ratios, limits=limits)


if __name__ == "__main__":
    main()
