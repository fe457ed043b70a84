"""`infini verify` and `infini clean` as users run them, and the cleaning after preprocess."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Environment, dataset_of, infini_here, tiny, write_settings, write_texts
from s3_server import S3Server

from infini_model.config import load_config
from infini_model.data.build import build_dataset
from infini_model.data.manifest import read_manifest
from infini_model.data.sources.listing import list_sources
from infini_model.runtime.object_store import ObjectStore

Told = Callable[..., tuple[int, str, str]]


@pytest.fixture
def told(alone: Environment, output: Path) -> Told:
    """Run a command on the output folder: its exit status, output and errors."""

    def tell(*arguments: str | Path) -> tuple[int, str, str]:
        done = infini_here(*arguments, "--output-dir", output, env=alone)
        return done.returncode, done.stdout, done.stderr

    return tell


def test_damaged_datasets_are_named_old_ones_removed(
    tmp_path: Path, output: Path, told: Told
) -> None:
    texts = write_texts(tmp_path / "texts", 12)
    settings = write_settings(tmp_path / "settings.yaml", tiny(texts, output))
    first = dataset_of(settings)
    status, shown, _ = told("verify")
    assert status == 0
    assert shown.startswith(f"{first}: intact (verified 3 shards, ")
    shards = [first / name for name, _ in read_manifest(first).files()]
    shards[0].write_bytes(bytes(shards[0].stat().st_size))
    shards[1].unlink()
    for name in (first, "tiny", output / "datasets"):
        status, shown, error = told("verify", name)
        assert status == 2
        assert shown.splitlines() == [
            f"{shards[0]}: is damaged: its checksum differs from its record",
            f"{shards[1]}: is missing",
        ]
        assert "2 files missing or damaged (verified 3 shards, " in error
        assert error.endswith("infini preprocess makes their partitions again, and no others\n")

    for path in filter(Path.is_file, output.rglob("*")):
        os.utime(path, (0, 0))
    write_texts(texts, 13)
    second = dataset_of(settings)
    before = sorted(output.rglob("*"))
    status, shown, _ = told("clean", "--keep", "1", "--dry-run")
    assert status == 0
    assert str(first) in shown
    assert sorted(output.rglob("*")) == before
    assert "To remove: 1 partition, 1 dataset: " in shown
    status, removed, _ = told("clean", "--keep", "1")
    assert status == 0
    assert removed == shown.replace("To remove", "Removed")
    assert (first.exists(), second.exists()) == (False, True)
    assert told("clean", "--keep", "1")[1] == "Nothing to remove\n"


def test_of_a_dataset_in_a_store_the_objects_are_listed(
    bucket: str,
    s3: S3Server,
    tmp_path: Path,
    text_files: Path,
    alone: Environment,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = str(tmp_path / "cache")
    monkeypatch.setenv("INFINI_CACHE_DIR", cache)
    env = alone | s3.environment() | {"INFINI_CACHE_DIR": cache}
    data = {"source": {"paths": [str(text_files / "*.txt")]}, "workers": 1}
    config = load_config(overrides=[{"run": {"output_dir": f"{bucket}/team"}, "data": data}])
    run, datasets = config.run, config.run.datasets_store
    listing = list_sources(config.data, run.output_dir)
    manifest = build_dataset(listing, config.data, run.datasets_dir, store=datasets)
    address = f"{datasets}/{manifest.folder_name}"
    there = ("--output-dir", f"{bucket}/team")
    # An address needs no settings.
    for arguments in (there, (manifest.folder_name, *there), (f"{address}/",), ("-d", datasets)):
        done = infini_here("verify", *map(str, arguments), env=env)
        note, result = done.stdout.splitlines()
        assert note == f"note: only the shards on this machine are verified, not {datasets}"
        assert f"/{manifest.folder_name}: intact (verified 0 shards, " in result
    small = ("packing.context_length=64", "model.segment_length=32", "training.batch_size=1")
    done = infini_here("show", address, *small, env=env)
    assert done.stdout.startswith(f"Dataset: {address}\n"), done.stderr
    assert "── window " in done.stdout
    ObjectStore(address).delete(["train/state.json"])
    done = infini_here("verify", *there, env=env)
    assert done.returncode == 2
    assert f"{address}/train/state.json: is missing" in done.stderr
