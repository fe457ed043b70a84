"""Every damaged file of a dataset is found, and forgotten, so that the next build mends it."""

import os

import pytest
from corpora import build, files_config, make_texts, write_files

from infini_model.data import verification
from infini_model.data.verification import examine_dataset, verify_dataset
from infini_model.runtime.errors import DataError


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A configuration and its dataset, which counts as too large to be read every time."""
    monkeypatch.setattr(verification, "SMALL_BYTES", 1)
    raw = write_files(tmp_path / "raw", [text * 400 for text in make_texts(12)])
    config = files_config(raw / "*", partition_megabytes=1, workers=1)
    manifest, folder = build(config, tmp_path)
    assert len(manifest.partitions) > 2
    return config, manifest, folder


def rot(path):
    """Change one bit, as a bad disk does: neither the size nor the timestamps tell."""
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_all_faults_are_found_and_the_next_build_mends_only_them(tmp_path, large):
    config, manifest, folder = large
    shards = [(folder / name, shard) for name, shard in manifest.files()]
    whole = {path: path.read_bytes() for path, _ in shards}
    (one, its_shard), (other, _), (gone, _) = shards[0], shards[1], shards[2]
    rot(one)
    rot(other)
    gone.unlink()
    (folder / "test" / "state.json").unlink()
    with pytest.raises(DataError, match=r"state\.json: is missing"):
        verify_dataset(folder)
    seen = []
    verified = examine_dataset(folder, every=True, progress=lambda *counts: seen.append(counts))
    assert verified.faults == [
        f"{folder / 'test' / 'state.json'}: is missing",
        f"{one}: is damaged: its checksum differs from its record",
        f"{other}: is damaged: its checksum differs from its record",
        f"{gone}: is missing",
    ]
    total = sum(shard.bytes for path, shard in shards if path != gone)
    assert [count for count, _ in seen] == sorted(count for count, _ in seen)
    assert seen[-1] == (total, total)
    partition = tmp_path / "datasets" / ".partitions" / its_shard.path
    assert partition.read_bytes() != whole[one]
    assert build(config, tmp_path)[1] == folder
    assert {path: path.read_bytes() for path, _ in shards} == whole
    assert partition.read_bytes() == whole[one]
    assert not examine_dataset(folder, every=True).faults


def test_what_was_verified_before_is_only_read_again_on_demand(large):
    _, manifest, folder = large
    rot(folder / next(manifest.files())[0])
    assert verify_dataset(folder) == manifest
    assert len(examine_dataset(folder, every=True).faults) == 1
    with pytest.raises(DataError, match="is damaged"):
        verify_dataset(folder)
