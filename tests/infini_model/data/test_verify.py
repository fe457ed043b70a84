"""What a dataset folder must have; what is damaged is found, named and mended by the next build."""

import json
import os

import pytest
from builds import verify_dataset
from corpora import build, files_config, make_texts, write_files

from infini_model.config import PackingConfig
from infini_model.data.datasets import Datasets
from infini_model.data.loading.windows import open_windows
from infini_model.data.manifest import read_manifest
from infini_model.data.sources.files import Listing, SourceFile
from infini_model.data.sources.formats import whole_file
from infini_model.data.verify import examine_dataset
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError
from infini_model.runtime.fact_cache import fact_cache
from infini_model.runtime.records import write_record
from infini_model.runtime.storage import make_folder


def test_what_is_no_dataset_is_named(tmp_path, byte_dataset):
    packing = PackingConfig(context_length=64)
    other, newer = (make_folder(tmp_path / name) for name in ("other", "newer"))
    tree = json.loads((byte_dataset / "manifest.json").read_text())
    (newer / "manifest.json").write_text(json.dumps(tree | {"format_version": 99}))
    for read, complaint in (
        (lambda: examine_dataset(tmp_path / "gone"), "gone: is not a dataset folder"),
        (lambda: verify_dataset(other), r"other: .*has no manifest\.json"),
        (lambda: verify_dataset(newer), "has format version 99"),
        (lambda: open_windows(other, "train", packing, 16), "other: is not a complete"),
        (lambda: open_windows(byte_dataset, "dev", packing, 16), "split 'dev' is unknown"),
    ):
        with pytest.raises(DataError, match=complaint):
            read()


def test_a_record_with_a_name_that_is_not_utf8_is_refused_in_one_line(tmp_path):
    file = SourceFile(address="/a/\udc80.txt", bytes=3, fingerprint="sha256:ab", version="1")
    path = tmp_path / "listing.json"
    with pytest.raises(DataError, match=r"listing\.json: cannot be written: .*'\\udc80'"):
        write_record(path, Listing(sources={"": [whole_file(file)]}))
    assert not path.exists()


def test_all_faults_are_found_and_the_next_build_mends_only_them(tmp_path, caplog):
    raw = write_files(tmp_path / "raw", [text * 400 for text in make_texts(12)])
    config = files_config(raw / "*", partition_megabytes=1, workers=1)
    manifest, folder = build(config, tmp_path)
    assert len(manifest.partitions) > 2
    shards = [(folder / name, shard) for name, shard in manifest.files()]
    whole = {path: path.read_bytes() for path, _ in shards}
    partitions = tmp_path / "datasets" / ".partitions"
    made = {path: path.stat().st_mtime_ns for path in partitions.rglob("*.arrow")}
    (one, its_shard), (gone, _), (other, _) = shards[0], shards[1], shards[-1]
    # One bit, as on a bad disk: neither the size nor the timestamps tell.
    stat, data = one.stat(), bytearray(whole[one])
    data[len(data) // 2] ^= 1
    one.write_bytes(data)
    os.utime(one, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    # What was verified before is only read again on demand.
    assert verify_dataset(folder) == manifest
    os.truncate(other, 100)
    gone.unlink()
    (folder / "test" / "state.json").unlink()
    with pytest.raises(DataError, match=r"state\.json: is missing"):
        verify_dataset(folder)
    assert examine_dataset(folder, reads_all=True)[1] == [
        f"{folder / 'test' / 'state.json'}: is missing",
        f"{one}: is damaged: its checksum differs from its record",
        f"{gone}: is missing",
        f"{other}: has 100 bytes, its record says {shards[-1][1].bytes}",
    ]
    # It is known from now on.
    assert len(examine_dataset(folder)[1]) == 4
    assert build(config, tmp_path)[1] == folder
    assert caplog.text.count(f"{partitions / its_shard.path}: is damaged") == 1
    assert {path: path.read_bytes() for path, _ in shards} == whole
    # Damage to a file damages its partition, too; a missing link is only linked again.
    anew = {path.parent.name for path, when in made.items() if path.stat().st_mtime_ns != when}
    assert anew == {shard.path.split("/")[0] for shard in (its_shard, shards[-1][1])}
    assert not examine_dataset(folder, reads_all=True)[1]


def test_a_restored_folder_is_compared_and_one_without_shards_is_damaged(tmp_path, several):
    _, folder = build(several, tmp_path)
    name, shard = next(read_manifest(folder).files())
    partition = tmp_path / "datasets" / ".partitions" / shard.path
    whole = partition.read_bytes()
    for path in folder.rglob("*.arrow"):
        path.unlink()
    with pytest.raises(DataError, match=r"is missing$"):
        verify_dataset(folder)
    # As a copy without times leaves what has lost a bit.
    partition.write_bytes(whole[:-9] + b"\1" + whole[-8:])
    fact_cache.cache_clear()
    build(several, tmp_path)
    assert (folder / name).read_bytes() == partition.read_bytes() == whole


def test_a_manifest_is_parsed_again_only_if_it_was_written(tmp_path, several):
    manifest, folder = build(several, tmp_path)
    first = read_manifest(folder)
    assert first == manifest
    assert read_manifest(folder) is first
    write_record(folder / "manifest.json", manifest.model_copy(update={"seconds": 1.5}))
    assert read_manifest(folder).seconds == 1.5


def test_what_one_machine_has_compared_no_other_reads(tmp_path, several, monkeypatch):
    manifest, folder = build(several, tmp_path)
    read, sha256 = [], storage.sha256
    monkeypatch.setattr(storage, "sha256", lambda path: read.append(path) or sha256(path))

    def another_machine():
        fact_cache.cache_clear()
        read.clear()
        assert verify_dataset(folder) == manifest
        assert set(Datasets(folder.parent).find_partitions(manifest.partitions)) == partitions
        return len(read)

    partitions = set(manifest.partitions)
    assert another_machine() == 0
    # A copy elsewhere that has lost the times.
    for path in folder.rglob("*.arrow"):
        os.utime(path)
    assert another_machine() == len(list(manifest.files()))
    assert another_machine() == 0
