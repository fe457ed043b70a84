"""The weights of a model on the hub: fetched with progress, and a full disk is named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from disks import SmallDisk
from local_hub import Repository, serve_hub

from infini_model.runtime import storage

# A process of its own, since the hub's address is read when its package is imported.
FETCH = """
import json, sys
from infini_model.data.sources.hub import fetch_weights
seen = []
try:
    folder = str(fetch_weights("team/llama", sys.argv[1], lambda *position: seen.append(position)))
except (ValueError, ConnectionError) as error:
    folder = f"{type(error).__name__}: {error}"
print(json.dumps([folder, seen]))
"""
SHARDS = {f"model-{number:05d}-of-00012.safetensors": 40_000 + number for number in range(12)}
FILES = {name: os.urandom(size) for name, size in SHARDS.items()} | {
    "config.json": b"{}",
    "model.bin": b"pickle",
    "original/consolidated.safetensors": b"a copy",
}
TOTAL = sum(SHARDS.values()) + 2


@pytest.fixture
def hub():
    with serve_hub() as server:
        server.repositories["team/llama"] = Repository(FILES)
        yield server


def fetch(hub, home, **options):
    """The folder or the error, and each (done, total) that was reported."""
    env = os.environ | {"HF_ENDPOINT": hub.address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", FETCH, hub.repositories["team/llama"].commit]
    done = subprocess.run(command, env=env, capture_output=True, text=True, **options)
    assert "%|" not in done.stderr  # no bar
    found, seen = json.loads(done.stdout)
    return found, [tuple(position) for position in seen]


def test_progress_counts_the_bytes_of_all_files_and_those_of_an_earlier_attempt(hub, tmp_path):
    folder, seen = fetch(hub, tmp_path)
    assert {total for _, total in seen} == {TOTAL}
    assert seen == sorted(seen)
    assert seen[-1] == (TOTAL, TOTAL)
    assert len(seen) == len(SHARDS) + 1
    assert fetch(hub, tmp_path) == (folder, [])

    lost, size = next(iter(SHARDS.items()))
    pointer = Path(folder, lost)
    pointer.resolve().unlink()
    pointer.unlink()
    assert fetch(hub, tmp_path) == (folder, [(TOTAL, TOTAL)])
    assert pointer.stat().st_size == size


def test_what_a_killed_download_left_is_removed_and_what_another_one_writes_is_not(hub, tmp_path):
    folder, _ = fetch(hub, tmp_path)
    blobs = Path(folder).parents[1] / "blobs"
    one, other = (path.name for path in sorted(blobs.iterdir())[:2])
    left, written = blobs / f"{one}.1234abcd.incomplete", blobs / f"{other}.1234abcd.incomplete"
    for path in (left, written):
        path.write_bytes(b"half")
    with storage.lock(tmp_path / "hub" / ".locks" / "models--team--llama" / f"{other}.lock"):
        assert fetch(hub, tmp_path) == (folder, [])
    assert [path.exists() for path in (left, written)] == [False, True]


def test_a_full_disk_is_named_and_is_no_silent_hub(hub, tmp_path):
    disk = SmallDisk(tmp_path / "disk")
    try:
        hub.repositories["team/llama"] = Repository({"model.safetensors": bytes(1 << 21)})
        error, _ = fetch(hub, disk.folder, **disk.limits)
        assert error.startswith(f"UserError: {disk.folder}/hub: ")
        assert "the disk is full" in error or "File too large" in error
        disk.grow()
        folder, _ = fetch(hub, disk.folder)
        assert [path.name for path in Path(folder).iterdir()] == ["model.safetensors"]
    finally:
        disk.close()
