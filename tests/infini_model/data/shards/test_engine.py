"""Any engine makes the same partitions: here one whose workers share nothing but the store."""

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from corpora import build, files_config, make_texts, write_files, write_parquet

from infini_model.data.keeping.staging import staged_dataset
from infini_model.data.shards.dataset import build_dataset, requested_dataset
from infini_model.data.shards.partition_store import LocalPartitions
from infini_model.data.sources.download import download
from infini_model.runtime.errors import StageError

WORKER = """
import os, signal, sys, tempfile
from pathlib import Path
from infini_model.data.keeping.stored_partitions import StoredPartitions
from infini_model.data.shards.partition_store import LocalPartitions
from infini_model.data.shards.partitions import PartitionSpec
place = sys.argv[1]
own = Path(tempfile.mkdtemp(dir=sys.argv[2]))
store = StoredPartitions(place, own) if "://" in place else LocalPartitions(Path(place))
for line in sys.stdin:
    spec = PartitionSpec.model_validate_json(line)
    store.make(spec, store.tokenizer(spec), lambda count: None)
    print(spec.key, flush=True)
    if sys.argv[3:] == ["dies"]:
        os.kill(os.getpid(), signal.SIGKILL)
"""


class ProcessEngine:
    """Two processes, each of which makes every partition: what is made twice does no harm.

    A process has an empty folder of its own below `folder`, and shares nothing but the store.
    """

    def __init__(self, folder, *arguments):
        self._folder, self._arguments = str(folder), arguments
        self.made = 0

    def __call__(self, config, tokenizer):
        return self

    def make(self, specs, store, advance):
        lines = "".join(f"{spec.model_dump_json()}\n" for spec in specs)
        place = store.place.removesuffix("/.partitions")
        command = [sys.executable, "-c", WORKER, place, self._folder, *self._arguments]

        def work(_):
            done = subprocess.run(command, input=lines, capture_output=True, text=True)
            if done.returncode:
                raise StageError(f"a worker ended with status {done.returncode}: {done.stderr}")
            return done.stdout.split()

        with ThreadPoolExecutor(2) as pool:
            made = list(pool.map(work, range(2)))
        assert made == [[spec.key for spec in specs]] * 2
        self.made += len(specs)


def files_of(datasets_dir):
    return {
        str(path.relative_to(datasets_dir)): path.read_bytes()
        for path in sorted(datasets_dir.rglob("*.arrow"))
    }


def config_of(tmp_path):
    raw = write_files(tmp_path / "raw", [text * 200 for text in make_texts(20, 3)])
    write_parquet(tmp_path / "more.parquet", make_texts(300, 1), row_group_size=30)
    return files_config(
        raw / "*",
        tmp_path / "more.parquet",
        partition_megabytes=1,
        tokenizer={"spec": "train", "vocab_size": 300},
    )


def test_processes_make_the_same_files_as_threads(tmp_path):
    config = config_of(tmp_path)
    build(config, tmp_path / "threads")
    engine = ProcessEngine(tmp_path)
    listing = download(config, tmp_path / "processes")
    manifest = build_dataset(listing, config, tmp_path / "processes", make_engine=engine)
    assert engine.made == len(manifest.partitions) > 3
    assert files_of(tmp_path / "processes") == files_of(tmp_path / "threads")
    build_dataset(listing, config, tmp_path / "processes", make_engine=engine)
    assert engine.made == len(manifest.partitions)


def test_processes_that_share_nothing_but_an_object_store_make_the_same_files(tmp_path, bucket):
    raw = write_files(tmp_path / "raw", [text * 200 for text in make_texts(20)])
    config = files_config(raw / "*", partition_megabytes=1)
    expected, _ = build(config, tmp_path / "threads")
    engine = ProcessEngine(tmp_path)
    listing = download(config, tmp_path / "processes")
    for _ in range(2):
        manifest = build_dataset(
            listing, config, tmp_path / "processes", store=f"{bucket}/data", make_engine=engine
        )
        assert engine.made == len(manifest.partitions) > 3
    assert manifest.splits == expected.splits
    folder = tmp_path / "processes" / "datasets" / manifest.folder_name
    with staged_dataset(folder):
        assert files_of(folder) == files_of(tmp_path / "threads" / "datasets" / folder.name)


def test_what_a_lost_worker_finished_is_kept(tmp_path):
    config = config_of(tmp_path)
    listing = download(config, tmp_path)
    with pytest.raises(StageError, match=str(-signal.SIGKILL)):
        build_dataset(listing, config, tmp_path, make_engine=ProcessEngine(tmp_path, "dies"))
    kept = LocalPartitions(tmp_path / "datasets").keys()
    assert kept
    engine = ProcessEngine(tmp_path)
    manifest = build_dataset(listing, config, tmp_path, make_engine=engine)
    assert engine.made == len(set(manifest.partitions)) - len(kept)


def test_a_spec_is_small_and_travels_as_json(tmp_path):
    config = config_of(tmp_path)
    wanted = requested_dataset(download(config, tmp_path), config, tmp_path / "datasets")
    for spec in wanted.specs():
        line = spec.model_dump_json()
        assert type(spec).model_validate_json(line) == spec
        assert len(line) < 1000 + 500 * len(spec.ranges)
        assert json.loads(line)["key"] == spec.key
