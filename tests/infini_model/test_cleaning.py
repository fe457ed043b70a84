"""What nothing refers to is removed, what anything refers to or may need stays, killed or not."""

import argparse
import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from infini_model import cleaning
from infini_model.__main__ import STAGES
from infini_model.cleaning import remove_garbage
from infini_model.config import load_config
from infini_model.data.datasets import build_file, build_lock, register_use
from infini_model.data.manifest import read_manifest
from infini_model.data.verify import examine_dataset
from infini_model.runtime import storage
from infini_model.runtime.claims import claim_run
from infini_model.runtime.errors import DataError
from infini_model.runtime.runs import record_evaluation

DAY = 86_400.0


def preprocess(output, source, name="corpus", **data):
    """The stages of `infini preprocess`; returns the dataset folder."""
    data = {"name": name, "workers": 1, "partition_megabytes": 1, **data}
    data["source"] = {"paths": [str(source / "*.txt")]}
    config = load_config(overrides=[{"run": {"output_dir": str(output)}, "data": data}])
    listing = STAGES["download"](config, argparse.Namespace())["listing"]
    arguments = argparse.Namespace(listing=Path(listing))
    STAGES["plan"](config, arguments)
    return Path(STAGES["shard"](config, arguments)["folder"])


def write_text(folder, name, times=16_000):
    text = f"{name} words of a document that is neither short nor long. "
    (storage.make_folder(folder) / f"{name}.txt").write_text(text * times)


def age(folder, seconds):
    """Make a dataset look as if it had been used so long ago."""
    then = time.time() - seconds
    for path in (folder / "manifest.json", build_file(folder)):
        os.utime(path, (then, then))


def age_files(folder):
    """Make all files look as if they had been written two days before."""
    for path in filter(Path.is_file, folder.rglob("*")):
        os.utime(path, (0, path.stat().st_mtime - 2 * DAY))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An output folder with three datasets of a source that changes, and the source."""
    root = tmp_path_factory.mktemp("made").resolve()
    output, source = root / "output", root / "texts"
    write_text(source, "stays")
    for number in range(3):
        write_text(source, f"new{number}")
        (source / "new0.txt").write_text(f"version {number} " * 90_000)
        # The clock of the file system may be coarse.
        age(preprocess(output, source), 60.0 * (2 - number))
    return output, source


@pytest.fixture
def output(made, tmp_path):
    """A copy of the output folder."""
    subprocess.run(["cp", "-a", made[0], tmp_path], check=True)
    return tmp_path.resolve() / "output"


@pytest.fixture
def folders(output):
    """Its datasets, that used longest ago first."""
    return sorted(datasets(output), key=lambda path: (path / "manifest.json").stat().st_mtime)


@pytest.fixture(autouse=True)
def later(monkeypatch):
    """Set how many seconds later the cleanings are; by default nothing is recent any more."""

    def wait(seconds):
        clock = SimpleNamespace(time=lambda: time.time() + seconds)
        monkeypatch.setattr(cleaning, "time", clock)

    wait(2 * DAY)
    return wait


def clean_up(output, keep=2, only=None, **options):
    return remove_garbage(output, output / "datasets", keep, only=only, **options)


def datasets(output):
    return set((output / "datasets").glob("[!.]*-*"))


def partitions(output):
    return {path.name for path in (output / "datasets" / ".partitions").glob("[0-9a-f]*")}


def listed(*folders):
    return {key for folder in folders for key in read_manifest(folder).partitions}


def du(folder):
    """Bytes on the disk."""
    return int(subprocess.check_output(["du", "-s", "-B1", folder], text=True).split()[0])


def state(folder):
    stats = {str(path): path.lstat() for path in folder.rglob("*")}
    return {path: (stat.st_mtime_ns, stat.st_ino) for path, stat in stats.items()}


def assert_intact(*folders):
    for folder in folders:
        assert not examine_dataset(folder, reads_all=True)[1]


def assert_left(output, *folders):
    """These datasets and their partitions are there, intact, and nothing else of the kind."""
    assert datasets(output) == {*folders}
    assert partitions(output) == listed(*folders)
    assert_intact(*folders)
    assert not any(map(Path.is_file, output.rglob(".tmp-*/**/*")))


def test_the_newest_stay_and_what_is_freed_is_what_du_says(made, output, folders):
    old, middle, new = folders
    assert listed(old) & listed(middle)
    before, held = state(output), du(output)
    found = clean_up(output, dry_run=True)
    assert state(output) == before
    cleaned = clean_up(output)
    assert cleaned == found
    assert found.problems == []
    assert set(found.counts) == {"dataset", "partition"}
    # Folders have blocks, too.
    assert found.bytes == pytest.approx(held - du(output), rel=0.1)
    assert found.bytes > 9e5
    assert_left(output, middle, new)
    assert clean_up(output).kinds == {}
    assert preprocess(output, made[1]) == new


def test_each_name_keeps_its_own_and_what_was_used_lately_stays(output, folders, tmp_path, later):
    others = []
    for name in ("one", "two"):
        write_text(tmp_path / "others", name, 9)
        others.append(preprocess(output, tmp_path / "others", name="other"))
        age(others[-1], 60.0 * (2 - len(others)))
    found = clean_up(output, keep=1, only="other", dry_run=True).kinds
    assert [path for path, kind in found.items() if kind == "dataset"] == others[:1]
    later(0)
    age_files(output)
    for folder in (folders[0], folders[2], others[1]):
        register_use(folder)
    clean_up(output, keep=1)
    assert_left(output, folders[0], folders[2], others[1])


def run_on(output, dataset, name, *, finish=False):
    run = {"output_dir": str(output), "name": name}
    config = load_config(overrides=[{"run": run, "training": {"max_steps": 9}}])
    key = read_manifest(dataset).key
    with claim_run(config, key, dataset) as run_dir:
        if finish:
            record_evaluation(run_dir, 9, key, {})
        return run_dir


def test_what_a_run_refers_to_stays_with_its_partitions(output, folders, later):
    first, second, last = folders
    run_on(output, first, "finished", finish=True)
    interrupted = run_on(output, second, "interrupted")
    later(30 * DAY)
    clean_up(output, keep=1)
    assert_left(output, *folders)
    shutil.rmtree(interrupted)
    clean_up(output, keep=1)
    assert_left(output, first, last)


def test_while_something_is_damaged_that_may_refer_to_data_nothing_is_removed(output, folders):
    place, run_dir = output / "datasets", run_on(output, folders[0], "run")
    manifests = [folder / "manifest.json" for folder in folders[1:]]
    refers = [*manifests, *place.glob(".[bl]*/*.json"), run_dir / "run.json"]
    assert len(refers) == 9
    for path in refers:
        whole = path.read_bytes()
        path.write_text("{")
        with pytest.raises(DataError, match=f"^{path}: is damaged"):
            clean_up(output)
        assert datasets(output) == {*folders}
        path.write_bytes(whole)


def test_what_strangers_have_put_there_stays(output, folders, later):
    place = output / "datasets"
    (place / "mine").mkdir()
    (place / "mine" / "manifest.json").write_text("{}")
    (place / "notes.txt").write_text("not to be lost")
    (output / "raw" / "notes.txt").write_text("not to be lost")
    (output / "raw" / "linked").symlink_to(place / "mine")
    before = state(output)
    later(59 * DAY)
    assert clean_up(output, keep=9).counts == {}
    assert state(output) == before


def test_an_interrupted_build_keeps_its_partitions_for_a_week(output, folders, later):
    whole, its_own = partitions(output), listed(folders[2])
    for folder in folders:
        shutil.rmtree(folder)
    later(6 * DAY)
    clean_up(output)
    assert partitions(output) == whole
    later(30 * DAY)
    with storage.lock(build_lock(folders[2])):  # Somebody works on it again.
        clean_up(output)
    assert partitions(output) == its_own
    clean_up(output)
    assert partitions(output) == set()
    assert not [*(output / "datasets").glob(".[bl]*/*.json")]


def test_downloads_and_screened_texts_stay_with_the_datasets_made_from_them(tmp_path, later):
    output = tmp_path / "output"
    for name, place in {"raw": output / "raw", "not": output / "datasets/.screened"}.items():
        its_own, new, _ = folders = [place / (letter * 32) for letter in "abc"]
        for folder in folders:
            write_text(folder, folder.name, 9)
        age(preprocess(output, its_own, name=name), 60)
        preprocess(output, new, name=name)
        later(6 * DAY)
        clean_up(output, keep=1)
        assert all(folder.exists() for folder in folders)
        later(8 * DAY)
        if name == "raw":
            with storage.lock(place / ".lock", shared=True):  # A download is under way.
                clean_up(output, keep=1)
            assert its_own.exists()
        clean_up(output, keep=1)
        assert [folder.exists() for folder in folders] == [False, True, False]


def test_leftovers_of_killed_processes_go_but_those_of_living_ones_stay(output, folders, later):
    leftover = output / "datasets" / f".tmp-{folders[2].name}-abc"
    leftover.mkdir()
    with storage.lock(build_lock(folders[2])):
        clean_up(output)
    later(0)
    clean_up(output)
    assert leftover.exists()
    later(2 * DAY)
    clean_up(output)
    assert not leftover.exists()


def checkpoint(run_dir, step):
    with storage.atomic_folder(run_dir / "checkpoints" / f"step-{step}") as temporary:
        (temporary / "weights").write_bytes(bytes(9000))
        sums = {"weights": storage.sha256(temporary / "weights")}
        storage.dump_json(temporary / "manifest.json", {"sha256": sums})


def test_only_finished_runs_lose_their_old_checkpoints(output, folders):
    done, bad = (run_on(output, folders[2], name, finish=True) for name in ("done", "bad"))
    cut = run_on(output, folders[2], "cut")
    losses = [{"step": step, "time": 1.0, "validation/loss": abs(step - 5)} for step in (3, 5, 9)]
    for run_dir in (done, bad, cut):
        for step in (3, 5, 7, 9):
            checkpoint(run_dir, step)
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in losses))
    (bad / "checkpoints" / "step-9" / "weights").write_bytes(b"damaged")
    (done / "checkpoints" / "damaged-step-8").mkdir()
    with storage.lock(done / ".lock"):
        assert clean_up(output, keep=9).counts == {"checkpoint": 1}
    assert "checkpoint" not in clean_up(output, only="corpus").counts
    assert clean_up(output, keep=9).counts == {"checkpoint": 3}
    left = [{p.name for p in (each / "checkpoints").glob("[!.]*")} for each in (done, bad, cut)]
    # The best one stays besides the newest, and the newest that is intact.
    assert left[:2] == [{"step-5", "step-9"}, {"step-5", "step-7", "step-9"}]
    assert left[2] == {f"step-{n}" for n in (3, 5, 7, 9)}


def test_what_cannot_be_removed_is_named_and_the_rest_goes(output, folders, monkeypatch):
    old, middle, new = folders

    def refusing(plain, kept):
        def refuse(path, *others, **where):
            if kept in str(path):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return plain(path, *others, **where)

        return refuse

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refusing(os.rename, f"datasets/{middle.name}"))
        patch.setattr(os, "rmdir", refusing(os.rmdir, f".tmp-{old.name}"))
        problems = clean_up(output, keep=1).problems
    assert problems[0] == f"{middle}: cannot be removed: Permission denied"
    assert problems[1].startswith(f"{old.parent}/.tmp-{old.name}-")
    assert len(problems) == 2
    assert datasets(output) == {middle, new}
    assert_intact(middle, new)
    clean_up(output, keep=1)
    assert_left(output, new)


def killed_in_cleaning(output, moment):
    """Clean in another process, which is killed before its n-th change; whether it was."""
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (-signal.SIGKILL, 0)
        return status != 0
    moments = itertools.count()

    def die(event, arguments):
        changes = ("os.rename", "os.remove", "os.rmdir")
        # Below a folder that is removed, paths are relative.
        path = Path(str(arguments[0])) if event in changes else Path("/")
        is_change = not path.is_absolute() or path.is_relative_to(output)
        if is_change and next(moments) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(die)
        clean_up(output, keep=1)
        os._exit(0)
    finally:
        os._exit(1)


def test_a_cleaning_killed_at_any_moment_is_finished_by_the_next(output, folders, tmp_path, later):
    copy, killed = tmp_path / "copy", []
    later(0)
    age_files(output)
    for moment in itertools.chain(range(12), range(12, 60, 6)):
        shutil.rmtree(copy, ignore_errors=True)
        subprocess.run(["cp", "-a", output, copy], check=True)
        killed.append(killed_in_cleaning(copy, moment))
        assert_intact(*datasets(copy))
        clean_up(copy, keep=1)
        assert_left(copy, copy / "datasets" / folders[2].name)
        if not killed[-1]:
            break
    assert sum(killed) > 15


BUILDING = """
import itertools, sys
from pathlib import Path
from infini_model.config import load_config
from infini_model.data.build import build_dataset
from infini_model.data.sources.listing import list_sources
output_dir, source, enough = map(Path, sys.argv[1:])
for number in itertools.count():
    if number >= 8 and enough.exists():
        break
    (source / "changing.txt").write_text(f"{number % 3} " * 300_000)
    data = {"name": "corpus", "workers": 2, "partition_megabytes": 1}
    data["source"] = {"paths": [str(source / "*.txt")]}
    config = load_config(overrides=[{"data": data}]).data
    build_dataset(list_sources(config, output_dir), config, output_dir / "datasets")
"""


def test_builds_and_cleanings_at_once_do_each_other_no_harm(tmp_path, later, monkeypatch):
    """Two cleanings, too. Nothing is protected by its age, only by records and locks."""
    output, source = tmp_path / "output", tmp_path / "texts"
    enough = tmp_path / "enough"
    for number in range(3):
        write_text(source, number)
    is_older = cleaning._is_older

    def hurried(path, seconds):
        # All looks old, but for what somebody writes at this moment under no lock.
        return not path.name.startswith(storage.TEMPORARY) and is_older(path, seconds)

    monkeypatch.setattr(cleaning, "_is_older", hurried)
    later(30 * DAY)
    command = [sys.executable, "-c", BUILDING, output, source, enough]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as builder:
        removed = 0

        def clean_now(_):
            cleaned = clean_up(output, keep=1)
            assert cleaned.problems == []
            return cleaned.counts.get("partition", 0)

        try:
            with ThreadPoolExecutor(2) as pool:
                while builder.poll() is None:
                    removed += sum(pool.map(clean_now, range(2)))
                    time.sleep(0.05)  # for the builder to get its locks
                    if removed > 3:
                        enough.touch()
        finally:
            enough.touch()
        assert builder.returncode == 0
    assert removed > 3
    assert_intact(*datasets(output))
