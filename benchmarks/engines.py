"""What it costs to have partitions made by an engine: many partitions without any documents.

Each is made in a folder of datasets as any other: locked, written to three shards and a record,
flushed to the disk and renamed. "one loop" does that in one thread without an engine. "local" has a
thread for each core and "ray" a CPU for each in a cluster of one node, which is started here and
idle; the workers of a Ray job are new, so the first partition waits until they have imported the
library. "empty Ray tasks" make nothing: Ray by itself, on the same cluster.

"ms a partition" is what each further partition takes after the first one.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.report import Cell, publish, speed_ratio, spread, take_turns
from infini_model.config import DataConfig, SplitsConfig
from infini_model.data.manifest import TokenizerRecord
from infini_model.data.shards.engine import make_engine
from infini_model.data.shards.partition_store import LocalPartitions
from infini_model.data.shards.partitions import PartitionSpec
from infini_model.data.shards.writing import id_dtype
from infini_model.data.sources.formats import Reading
from infini_model.data.tokenizers.tokenizer import ByteTokenizer
from infini_model.runtime.cores import available_cores
from infini_model.runtime.on_ray.joining import joined
from infini_model.runtime.storage import content_key

LOOP, LOCAL, RAY, TASKS = "one loop", "local", "ray", "empty Ray tasks"
Make = Callable[[Sequence[PartitionSpec], Path], None]


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engines",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--partitions", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=3)
    return parser.parse_args()


def specs(count: int) -> list[PartitionSpec]:
    """Partitions of no files."""
    tokenizer = ByteTokenizer()
    record = TokenizerRecord(
        spec=tokenizer.spec,
        vocab_size=tokenizer.vocab_size,
        eos_token_id=tokenizer.eos_token_id,
        fingerprint=tokenizer.fingerprint,
        dtype=id_dtype(tokenizer.vocab_size).name,
    )
    return [
        PartitionSpec(
            key=content_key(number)[:32],
            ranges=(),
            reading=Reading(),
            tokenizer=record,
            tokenizer_folder="bytes",
            splits=SplitsConfig(),
            batch_size=1,
            bytes=0,
        )
        for number in range(count)
    ]


@contextlib.contextmanager
def cluster() -> Iterator[str]:
    """A Ray cluster of this machine while the block runs; yields its address."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": available_cores(), "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=node)
    try:
        yield str(made.address)
    finally:
        made.shutdown()


def one_loop(todo: Sequence[PartitionSpec], folder: Path) -> None:
    """Make partitions without an engine."""
    store, tokenizer = LocalPartitions(folder), ByteTokenizer()
    for spec in todo:
        store.make(spec, tokenizer, lambda _: None)


def with_engine(config: DataConfig) -> Make:
    """Make partitions with the engine of a configuration."""
    engine = make_engine(config, ByteTokenizer())
    return lambda todo, folder: engine.make(todo, LocalPartitions(folder), lambda _: None)


def empty_tasks(address: str) -> Make:
    """Run as many tasks that get the same arguments, and do nothing."""

    def run(todo: Sequence[PartitionSpec], _folder: Path) -> None:
        import ray

        with joined(address, "data"):
            task = ray.remote(lambda _spec: None)
            ray.get([task.remote(spec.model_dump_json()) for spec in todo])

    return run


class Peer:
    """Measures one way to make partitions; `first` has the seconds of one partition, by turn."""

    def __init__(self, make: Make, todo: Sequence[PartitionSpec]) -> None:
        self._make, self._todo = make, todo
        self.first: list[float] = []

    def measure(self) -> float:
        """The milliseconds of each further partition."""
        self.first.append(self._seconds(self._todo[:1]))
        rest = self._seconds(self._todo) - self.first[-1]
        return 1e3 * rest / (len(self._todo) - 1)

    def _seconds(self, todo: Sequence[PartitionSpec]) -> float:
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            self._make(todo, Path(folder))
            return time.perf_counter() - began


def main() -> None:
    """Measure in turns and publish."""
    options = parse()
    todo = specs(options.partitions)
    with cluster() as address:
        peers = {
            LOOP: Peer(one_loop, todo),
            LOCAL: Peer(with_engine(DataConfig(workers=available_cores())), todo),
            RAY: Peer(with_engine(DataConfig(engine="ray", ray_address=address)), todo),
            TASKS: Peer(empty_tasks(address), todo),
        }
        work = {name: peer.measure for name, peer in peers.items()}
        milliseconds = take_turns(work, options.turns)
    rows: list[dict[str, Cell]] = [
        {
            "": name,
            "ms a partition": spread(milliseconds[name]),
            "partitions/s": 1e3 / spread(milliseconds[name]).median,
            "seconds for the first": spread(peer.first),
        }
        for name, peer in peers.items()
    ]
    ratios = {
        f"speed of {name} / {other}": speed_ratio(milliseconds[name], milliseconds[other])
        for name, other in ((LOCAL, LOOP), (RAY, LOOP), (RAY, LOCAL), (RAY, TASKS))
    }
    publish("engines", f"{options.partitions:,} partitions without documents", rows, ratios)


if __name__ == "__main__":
    main()
