"""`infini verify` and `infini clean` as users run them, and the cleaning after preprocess."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Environment, infini, infini_here, run, tiny, write_settings, write_texts
from s3_server import S3Server

from flows.upkeep import in_units, verify
from infini_model.config import Config, load_config
from infini_model.data.builds import build_file
from infini_model.data.manifest import Manifest, read_manifest
from infini_model.data.shards.dataset import build_dataset
from infini_model.data.sources.download import download
from infini_model.runtime.errors import DataError
from infini_model.runtime.object_stores.object_store import ObjectStore

Told = Callable[..., tuple[int, str, str]]


@pytest.fixture
def told(connected: Environment) -> Told:
    """Run a command: its exit status, what it printed, and what it complained about."""

    def tell(*arguments: str | Path) -> tuple[int, str, str]:
        done = run(infini(*arguments), connected)
        assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
        return done.returncode, done.stdout, done.stderr

    return tell


def datasets(output: Path) -> list[Path]:
    return [path for path in (output / "datasets").glob("[!.]*-*") if not path.is_symlink()]


def age(output: Path) -> None:
    """Make all datasets look as if they had last been used a day earlier."""
    for folder in datasets(output):
        for path in (folder / "manifest.json", build_file(folder)):
            then = path.stat().st_mtime - 86_400
            os.utime(path, (then, then))


@pytest.mark.slow
@pytest.mark.story
def test_a_dataset_is_verified_mended_and_cleaned_up(tmp_path: Path, told: Told) -> None:
    output, texts = tmp_path / "output", write_texts(tmp_path / "texts", 12)
    settings = write_settings(tmp_path / "settings.yaml", tiny(texts, output))
    status, _, error = told("verify", "--output-dir", output)
    assert (status, error.count("\n")) == (2, 1)
    assert "there is no finished dataset yet" in error

    assert told("preprocess", "--config", settings)[0] == 0
    (first,) = datasets(output)
    status, shown, _ = told("verify", "--output-dir", output)
    assert status == 0
    assert shown.startswith(f"{first}: intact (verified 3 shards, ")
    shards = [first / name for name, _ in read_manifest(first).files()]
    shards[0].write_bytes(bytes(shards[0].stat().st_size))
    shards[1].unlink()
    for name in (first, first.name, output / "datasets"):
        status, shown, error = told("verify", name, "--output-dir", output)
        assert status == 2
        assert shown.splitlines() == [
            f"{shards[0]}: is damaged: its checksum differs from its record",
            f"{shards[1]}: is missing",
        ]
        assert "2 files missing or damaged (verified 3 shards, " in error
        assert error.endswith("infini preprocess makes their partitions again, and no others\n")
    assert told("preprocess", "--config", settings)[0] == 0
    assert told("verify", "--output-dir", output)[0] == 0

    write_texts(texts, 13)
    keep = ("preprocess", "--config", settings, "data.keep=1")
    assert told(*keep)[0] == 0
    assert len(datasets(output)) == 2  # The first was used within the hour.
    age(output)
    before = sorted(output.rglob("*"))
    status, shown, _ = told("clean", "--keep", "1", "--dry-run", "--output-dir", output)
    assert status == 0
    assert str(first) in shown
    assert shown.endswith("Nothing was removed (--dry-run)\n")
    assert sorted(output.rglob("*")) == before
    in_all = next(line for line in shown.splitlines() if line.startswith("in all")).split()
    status, shown, _ = told("clean", "--keep", "1", "--output-dir", output)
    assert status == 0
    assert shown.splitlines()[-1] == f"Freed {' '.join(in_all[-2:])}"
    (second,) = datasets(output)
    assert told("verify", "--output-dir", output)[0] == 0
    _, shown, _ = told("clean", "--keep", "1", "--output-dir", output)
    assert shown == f"{output}: nothing to remove\n"

    write_texts(texts, 14)
    age(output)
    status, shown, error = told(*keep)
    assert status == 0
    assert "Removed" in shown + error
    (third,) = datasets(output)
    assert third != second


def test_damaged_copies_of_a_stored_dataset_are_copied_again(
    tmp_path: Path, dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "datasets" / dataset.name
    shutil.copytree(dataset, folder)
    (folder / "origin.json").write_text('{"partitions": "s3://bucket/datasets/.partitions"}')
    damaged, absent, *_ = [folder / name for name, _ in read_manifest(folder).files()]
    damaged.write_bytes(bytes(damaged.stat().st_size))
    absent.unlink()
    config = load_config(overrides=[f"run.output_dir={tmp_path}"])
    advice = r"1 file missing or damaged .*; the next training copies them again from the store$"
    with pytest.raises(DataError, match=advice):
        verify(config, folder.name)
    shown = capsys.readouterr().out.splitlines()
    assert shown[1:] == [f"{damaged}: is damaged: its checksum differs from its record"]


def build_in(config: Config) -> Manifest:
    listing = download(config.data, config.run.output_dir)
    output, store = config.run.output_dir, config.run.datasets_store
    return build_dataset(listing, config.data, output, store=store)


@pytest.fixture
def stored(
    bucket: str, tmp_path: Path, text_files: Path, monkeypatch: pytest.MonkeyPatch
) -> Config:
    """The settings of a machine whose datasets are in a store."""
    monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path / "cache"))
    data = {"source": {"paths": [str(text_files / "*.txt")]}, "workers": 1}
    return load_config(overrides=[{"run": {"output_dir": f"{bucket}/team"}, "data": data}])


@pytest.mark.parametrize("by", ["nothing", "name", "address", "address of all"])
def test_a_dataset_in_a_store_is_verified_by_reading_it(
    stored: Config, capsys: pytest.CaptureFixture[str], by: str
) -> None:
    manifest = build_in(stored)
    datasets = stored.run.datasets_store
    assert datasets is not None
    name, address = manifest.folder_name, f"{datasets}/{manifest.folder_name}"
    asked = {"nothing": None, "name": name, "address": f"{address}/", "address of all": datasets}
    # An address needs no settings.
    config = stored if by in ("nothing", "name") else load_config()
    verify(config, asked[by])
    assert capsys.readouterr().out.startswith(f"{address}: intact (verified 3 shards, ")

    partitions = ObjectStore(f"{datasets}/.partitions")
    damaged = manifest.splits["train"].shards[0]
    content = bytearray(partitions.read(damaged.path)[0])
    content[len(content) // 2] ^= 1
    partitions.write(damaged.path, bytes(content))
    ObjectStore(address).delete(["train/state.json"])
    advice = r"2 files missing or damaged .*; infini preprocess makes their partitions again"
    with pytest.raises(DataError, match=rf"^{address}: {advice}, and no others$"):
        verify(config, asked[by])
    assert capsys.readouterr().out.splitlines() == [
        f"{address}/train/state.json: is missing",
        f"{partitions.address_of(damaged.path)}: is damaged: its checksum differs from its record",
    ]
    assert build_in(stored).splits == manifest.splits
    verify(config, asked[by])


def test_the_command_takes_an_address_and_the_folder_of_datasets(
    s3: S3Server, stored: Config, dataset: Path, alone: Environment
) -> None:
    done = infini_here("verify", dataset.name, "--data-dir", dataset.parent, env=alone)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{dataset}: intact ")
    name, datasets = build_in(stored).folder_name, stored.run.datasets_store
    assert datasets is not None
    done = infini_here("verify", "-d", datasets, env=alone | s3.environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{datasets}/{name}: intact ")


@pytest.mark.story
def test_a_cleaning_that_fails_is_a_warning(tmp_path: Path, connected: Environment) -> None:
    output, texts = tmp_path / "output", write_texts(tmp_path / "texts", 12)
    settings = write_settings(tmp_path / "settings.yaml", tiny(texts, output))
    # Python reads it at its start: a cleaning never gets to its end.
    hang = "import signal, sys\nif 'clean' in sys.orig_argv:\n    signal.pause()\n"
    (tmp_path / "sitecustomize.py").write_text(hang)
    tree = ("data.keep=1", "stages.clean.timeout_seconds=0.1")
    done = run(
        infini("preprocess", "--config", settings, *tree),
        connected | {"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0
    shown = done.stdout + done.stderr
    assert "Older datasets were not removed: clean: not finished after 0.1 s" in shown


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 50, "5120.0 TiB")]
)
def test_sizes_have_units(size: int, text: str) -> None:
    assert in_units(size) == text
