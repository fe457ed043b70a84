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

import pytest

from infini_model.__main__ import STAGES
from infini_model.cleaning import Scope, delete_garbage, find_garbage, retire_garbage, usage
from infini_model.config import load_config
from infini_model.data.datasets import build_file, build_lock, register_use
from infini_model.data.manifest import read_manifest
from infini_model.data.verify import examine_dataset
from infini_model.runtime import storage
from infini_model.runtime.claims import claim_run
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


def clean_up(output, later=2 * DAY, **fields):
    """By default nothing is recent any more."""
    cleaned = retire_garbage(scope_of(output, later, **fields))
    delete_garbage(cleaned)
    return cleaned


def scope_of(output, later=2 * DAY, **fields):
    return Scope(output, output / "datasets", now=time.time() + later, **fields)


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
        assert not examine_dataset(folder, checksums="all").faults


def assert_left(output, *folders):
    """These datasets and their partitions are there, intact, and nothing else of the kind."""
    assert datasets(output) == {*folders}
    assert partitions(output) == listed(*folders)
    assert_intact(*folders)
    assert not list(output.rglob(".tmp-*"))


def test_the_newest_stay_and_what_is_freed_is_what_du_says(made, output, folders):
    old, middle, new = folders
    assert listed(old) & listed(middle)
    scope = scope_of(output)
    before, held = state(output), du(output)
    found = find_garbage(scope)
    assert state(output) == before
    expected = usage(found.kinds)
    cleaned = retire_garbage(scope)
    assert usage(cleaned.retired) == expected
    assert delete_garbage(cleaned) == held - du(output) == expected > 9e5
    assert (cleaned.kinds, cleaned.failures, cleaned.notes) == (found.kinds, [], [])
    assert_left(output, middle, new)
    assert find_garbage(scope).kinds == {}
    assert preprocess(output, made[1]) == new


def test_each_name_keeps_its_own_and_what_was_used_lately_stays(output, folders, tmp_path):
    others = []
    for name in ("one", "two"):
        write_text(tmp_path / "others", name, 9)
        others.append(preprocess(output, tmp_path / "others", name="other"))
        age(others[-1], 60.0 * (2 - len(others)))
    found = find_garbage(scope_of(output, keep=1, only="other")).kinds
    assert [path for path, kind in found.items() if kind == "dataset"] == others[:1]
    for folder in (*folders, *others):
        age(folder, 2 * DAY)
    register_use(folders[0])
    register_use(folders[2])
    clean_up(output, later=0, keep=1)
    assert datasets(output) == {folders[0], folders[2], others[1]}  # The last made is `latest`.


def run_on(output, dataset, name, *, finish=False):
    run = {"output_dir": str(output), "name": name}
    config = load_config(overrides=[{"run": run, "training": {"max_steps": 9}}])
    key = read_manifest(dataset).key
    with claim_run(config, key, dataset) as run_dir:
        if finish:
            record_evaluation(run_dir, 9, key, {})
        return run_dir


def test_what_a_run_refers_to_stays_with_its_partitions(output, folders):
    first, second, last = folders
    run_on(output, first, "finished", finish=True)
    interrupted = run_on(output, second, "interrupted")
    clean_up(output, 30 * DAY, keep=1)
    assert_left(output, *folders)
    whole = (interrupted / "run.json").read_text()
    (interrupted / "run.json").write_text("{")
    # A run that cannot be read may refer to anything.
    assert "no data is removed" in clean_up(output, 30 * DAY, keep=1).notes[0]
    assert datasets(output) == {*folders}
    (interrupted / "run.json").write_text(whole)
    shutil.rmtree(interrupted)
    clean_up(output, 30 * DAY, keep=1)
    assert_left(output, first, last)


def test_while_something_is_damaged_no_data_is_removed_since_it_may_refer_to_any_of_it(output):
    place = output / "datasets"
    refers = [*place.glob("[!l]*/manifest.json"), *place.glob(".listings/*.json")]
    assert len(refers) == 6
    for path in refers:
        whole = path.read_bytes()
        path.write_text("{")
        cleaned = clean_up(output, 30 * DAY, keep=1)
        [told] = cleaned.notes
        assert told.startswith(f"{path}: is damaged")
        assert told.endswith("; no data is removed, since it may refer to any of it")
        assert cleaned.kinds == {}
        path.write_bytes(whole)


def test_folders_of_strangers_stay(output):
    place = output / "datasets"
    (place / "mine").mkdir()
    (place / "mine" / "manifest.json").write_text("{}")
    (place / "notes.txt").write_text("not to be lost")
    before = state(output)
    assert clean_up(output, 59 * DAY, keep=9).counts == {}
    assert before.items() <= state(output).items()


def test_an_interrupted_build_keeps_its_partitions_for_a_week(output, folders):
    whole, its_own = partitions(output), listed(folders[2])
    for folder in folders:
        shutil.rmtree(folder)
    clean_up(output, 6 * DAY)
    assert partitions(output) == whole
    with storage.lock(build_lock(folders[2])):  # Somebody works on it again.
        clean_up(output, 30 * DAY)
    assert partitions(output) == its_own
    clean_up(output, 8 * DAY)
    assert partitions(output) == set()
    assert not list((output / "datasets" / ".builds").glob("*"))


def test_downloads_stay_with_the_datasets_made_from_them(tmp_path):
    output, built = tmp_path / "output", []
    its_raw, new_raw, loose = (output / "raw" / (name * 32) for name in "abc")
    for raw in (its_raw, new_raw):
        write_text(raw, raw.name, 9)
        built.append(preprocess(output, raw))
    age(built[0], 60)
    loose.mkdir()
    (loose / "1.txt.partial").write_text("half")
    clean_up(output)
    with storage.lock(output / "raw" / ".lock", shared=True):  # A download is under way.
        cleaned = clean_up(output, 8 * DAY)
    assert "is in use" in cleaned.notes[0]
    assert its_raw.exists()
    clean_up(output, keep=1)
    assert not its_raw.exists()
    assert loose.exists()
    assert len([*(output / "datasets" / ".listings").iterdir()]) == 1
    clean_up(output, 8 * DAY, keep=1)
    assert not loose.exists()
    assert new_raw.exists()


def test_screened_texts_stay_with_the_datasets_made_from_them(tmp_path):
    output = tmp_path / "output"
    folders = [output / "datasets" / ".screened" / (name * 32) for name in "abc"]
    for folder in folders:
        write_text(folder, folder.name, 9)
    first, _ = [preprocess(output, folder) for folder in folders[:2]]
    age(first, 60)
    clean_up(output, 8 * DAY)
    assert [folder.exists() for folder in folders] == [True, True, False]
    clean_up(output, keep=1)
    assert [folder.exists() for folder in folders] == [False, True, False]


def test_leftovers_of_killed_processes_go_but_those_of_living_ones_stay(output, folders):
    dead = output / "datasets" / f".tmp-{folders[2].name}-abc"
    young = output / "datasets" / ".listings" / ".tmp-corpus.json-abc"
    dead.mkdir()
    young.touch()
    with storage.lock(build_lock(folders[2])):
        clean_up(output, later=0)
    assert dead.exists()
    clean_up(output, later=0)
    assert [dead.exists(), young.exists()] == [False, True]
    clean_up(output)
    assert not young.exists()


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
        assert clean_up(output, keep=9).counts == {}
    assert clean_up(output, keep=9, only="corpus").counts == {}
    cleaned = clean_up(output, keep=9)
    assert cleaned.counts == {"checkpoint": 3}
    assert "the checkpoints before it are kept" in cleaned.notes[0]
    left = [{p.name for p in (each / "checkpoints").glob("[!.]*")} for each in (done, bad, cut)]
    # The best one stays besides the newest.
    assert left == [{"step-5", "step-9"}, *[{f"step-{n}" for n in (3, 5, 7, 9)}] * 2]


def test_what_cannot_be_removed_is_named_and_the_rest_goes(output, folders, monkeypatch):
    middle, new = folders[1:]
    leftover = output / "datasets" / ".listings" / ".tmp-theirs-abc"
    leftover.write_bytes(bytes(9000))

    def refusing(plain, kept):
        def refuse(path, *others, **where):
            if kept in str(path):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return plain(path, *others, **where)

        return refuse

    before = du(output)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refusing(os.rename, f"datasets/{middle.name}"))
        patch.setattr(os, "unlink", refusing(os.unlink, str(leftover)))
        cleaned = retire_garbage(scope_of(output, keep=1))
        freed = delete_garbage(cleaned)
    for path in (middle, leftover):
        assert f"{path}: cannot be removed: Permission denied" in cleaned.failures
    assert freed == before - du(output) > 0
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


def test_a_cleaning_killed_at_any_moment_is_finished_by_the_next(output, folders, tmp_path):
    copy, killed = tmp_path / "copy", []
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


def test_what_another_cleaning_removes_meanwhile_is_passed_over(output, folders, monkeypatch):
    read, (first, *others) = json.loads, sorted(folders)

    def remove_and_read(text, **options):
        shutil.rmtree(first, ignore_errors=True)
        build_file(first).unlink(missing_ok=True)
        return read(text, **options)

    monkeypatch.setattr(json, "loads", remove_and_read)
    found = find_garbage(scope_of(output, keep=2))
    assert found.notes == []
    assert found.counts.keys() == {"partition"}
    assert not {path.name for path in found.kinds} & listed(*others)


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
    build_dataset(list_sources(config, output_dir), config, output_dir)
"""


class Hurried(Scope):
    """To whom all looks old, but for files that somebody writes at this moment under no lock."""

    def is_older(self, path, seconds):
        return not path.name.startswith(storage.TEMPORARY) and super().is_older(path, seconds)


def test_builds_and_cleanings_at_once_do_each_other_no_harm(tmp_path):
    """Two cleanings, too. Nothing is protected by its age, only by records and locks."""
    output, source = tmp_path / "output", tmp_path / "texts"
    enough = tmp_path / "enough"
    for number in range(3):
        write_text(source, number)
    command = [sys.executable, "-c", BUILDING, output, source, enough]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as builder:
        removed = 0

        def clean_now(_):
            scope = Hurried(output, output / "datasets", keep=1, now=time.time() + 30 * DAY)
            cleaned = retire_garbage(scope)
            delete_garbage(cleaned)
            assert cleaned.failures == []
            return cleaned.counts.get("partition", 0)

        try:
            with ThreadPoolExecutor(2) as pool:
                while builder.poll() is None:
                    removed += sum(pool.map(clean_now, range(2)))
                    if removed > 3:
                        enough.touch()
        finally:
            enough.touch()
        assert builder.returncode == 0
    assert removed > 3
    assert_intact(*datasets(output))
