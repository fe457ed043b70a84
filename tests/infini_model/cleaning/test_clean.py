"""What nothing refers to is removed, what anything refers to or may need stays, killed or not."""

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infini_model.__main__ import STAGES
from infini_model.cleaning.clean import clean, find_unneeded
from infini_model.cleaning.removal import measure
from infini_model.cleaning.unneeded import Kind, Scope
from infini_model.config import load_config
from infini_model.data.builds import build_file, build_lock, note_use
from infini_model.data.keeping.holds import cache_lock, hold
from infini_model.data.manifest import read_manifest
from infini_model.data.verification import examine_dataset
from infini_model.runtime import storage
from infini_model.runtime.claims import claim_run
from infini_model.runtime.runs import dataset_of, record_evaluation

HOUR, DAY = 3600.0, 86_400.0


def config_of(output, source, name="corpus", **data):
    data = {"name": name, "workers": 1, "partition_megabytes": 1, **data}
    data["source"] = {"paths": [str(source / "*.txt")]}
    return load_config(overrides=[{"run": {"output_dir": str(output)}, "data": data}])


def preprocess(config):
    """The stages of `infini preprocess`; returns the dataset folder."""
    listing = STAGES["download"](config, argparse.Namespace())["listing"]
    arguments = argparse.Namespace(listing=Path(listing))
    STAGES["plan"](config, arguments)
    return Path(STAGES["shard"](config, arguments)["folder"])


def text(number, times=16_000):
    return f"{number} words of a document that is neither short nor long. " * times


@pytest.fixture
def output(tmp_path):
    return (tmp_path / "output").resolve()


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(text(number))
    return folder


def grow(output, source, times, *, large=16_000, **fields):
    """Datasets of a source with one file more each, and another file changed."""
    folders = []
    for number in range(times):
        (source / f"{len(list(source.iterdir()))}.txt").write_text(text(number + 7, large))
        (source / "0.txt").write_text(text(-number, large))
        folders.append(preprocess(config_of(output, source, **fields)))
        # The clock of the file system may be coarse.
        age(folders[-1], 60.0 * (times - len(folders)))
    return folders


def age(folder, seconds):
    """Make a dataset look as if it had been used so long ago."""
    then = time.time() - seconds
    for path in (folder / "manifest.json", build_file(folder)):
        os.utime(path, (then, then))


def scope_of(output, later=2 * HOUR, **fields):
    """By default nothing is recent any more."""
    return Scope(output, output / "datasets", now=time.time() + later, **fields)


def clean_up(scope):
    return clean(scope, find_unneeded(scope))


def datasets(output):
    return set((output / "datasets").glob("[!.]*-*"))


def partitions(output):
    return {path.name for path in (output / "datasets" / ".partitions").glob("[0-9a-f]*")}


def listed(*folders):
    return {key for folder in folders for key in read_manifest(folder).partitions}


def usage(folder):
    """What `du` says."""
    done = subprocess.run(["du", "-s", "-B1", folder], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


def state(folder):
    return {
        str(path): (path.lstat().st_mtime_ns, path.lstat().st_ino) for path in folder.rglob("*")
    }


def assert_intact(*folders):
    for folder in folders:
        assert not examine_dataset(folder, every=True).faults


def assert_left(output, *folders):
    """These datasets and their partitions are there, intact, and nothing else of the kind."""
    assert datasets(output) == {*folders}
    assert partitions(output) == listed(*folders)
    assert_intact(*folders)


def test_the_newest_stay_and_what_is_freed_is_what_du_says(output, source):
    old, middle, new = grow(output, source, 3)
    shared = listed(old) & listed(middle)
    assert shared
    clean_up(scope_of(output, keep=3))  # Makes the locks.
    scope = scope_of(output)
    before, held = state(output), usage(output)
    found = find_unneeded(scope)
    assert state(output) == before
    amounts = measure(found.items)
    cleaned = clean(scope, found)
    assert cleaned.bytes == held - usage(output) == sum(a.bytes for a in amounts.values()) > 9e5
    assert {kind: amount.count for kind, amount in amounts.items()} == dict(cleaned.counts)
    assert (cleaned.failures, cleaned.notes) == ([], [])
    assert_left(output, middle, new)
    assert shared <= partitions(output)
    assert not list(output.rglob(".tmp-*"))
    assert find_unneeded(scope).items == []
    assert preprocess(config_of(output, source)) == new


def test_copies_of_partitions_that_no_dataset_lists_go_unless_they_are_used(output, source):
    old, new = grow(output, source, 2)
    used = min(listed(old) - listed(new))
    copies = output / "datasets" / ".staged"
    shutil.copytree(output / "datasets" / ".partitions", copies)
    shutil.rmtree(copies / ".locks")
    stray = copies / ("0" * 32)
    stray.mkdir()

    def kept():
        return {path.name for path in copies.glob("[!.]*")}

    whole = kept()
    with storage.lock(cache_lock(copies)):
        notes = clean_up(scope_of(output, keep=1)).notes
    assert notes == [f"{copies}: copies of shards stay, since some are being copied"]
    assert (datasets(output), kept()) == ({new}, whole)
    with hold(copies, [used, *listed(new)]):
        clean_up(scope_of(output, keep=1))
        assert kept() == {used} | listed(new)
    clean_up(scope_of(output, later=0, keep=1))
    assert kept() == {used} | listed(new)  # Used lately, as its time says.
    clean_up(scope_of(output, keep=1))
    assert kept() == listed(new)
    assert not list(copies.glob(".tmp-*"))
    assert find_unneeded(scope_of(output, keep=1)).items == []


def test_each_name_keeps_its_own(output, source):
    first = [*grow(output, source, 2), *grow(output, source, 2, name="other")]
    found = find_unneeded(scope_of(output, keep=1, only="other")).items
    assert [path for kind, path in found if kind is Kind.DATASET] == [first[2]]
    clean_up(scope_of(output, keep=1))
    assert datasets(output) == {first[1], first[3]}


def test_what_was_used_lately_stays(output, source):
    old, middle, new = grow(output, source, 3)
    clean_up(scope_of(output, later=0, keep=1))
    assert datasets(output) == {old, middle, new}
    for folder in (old, middle, new):
        age(folder, 2 * DAY)
    note_use(old)
    clean_up(scope_of(output, later=0, keep=1))
    assert datasets(output) == {old, new}  # The last one made is `latest`.


def run_on(output, dataset, name, *, finish=False):
    config = load_config(
        overrides=[{"run": {"output_dir": str(output), "name": name}, "training": {"max_steps": 9}}]
    )
    key = read_manifest(dataset).key
    with claim_run(config, key, dataset) as run_dir:
        if finish:
            record_evaluation(run_dir, 9, key, {})
        return run_dir


def test_what_a_run_refers_to_stays_with_its_partitions(output, source):
    first, second, _, last = grow(output, source, 4)
    run_on(output, first, "finished", finish=True)
    interrupted = run_on(output, second, "interrupted")
    clean_up(scope_of(output, 30 * DAY, keep=1))
    assert_left(output, first, second, last)
    shutil.rmtree(interrupted)
    clean_up(scope_of(output, 30 * DAY, keep=1))
    assert datasets(output) == {first, last}


def test_a_run_of_another_output_folder_keeps_its_dataset(output, source, tmp_path):
    old, new = grow(output, source, 2)
    run_dir = run_on(tmp_path / "elsewhere", old, "abroad")
    assert dataset_of(run_dir) == old
    clean_up(scope_of(output, keep=1))
    assert datasets(output) == {old, new}
    (noted,) = (output / "datasets" / ".runs").glob("*.json")
    record = json.loads(noted.read_text())
    noted.write_text(json.dumps(record | {"host": "another machine", "run": "/not/here"}))
    clean_up(scope_of(output, keep=1))
    assert datasets(output) == {old, new}
    noted.write_text(json.dumps(record))
    # Of a disk that is not mounted nothing is known.
    (tmp_path / "elsewhere").rename(tmp_path / "unmounted")
    clean_up(scope_of(output, keep=2))
    assert noted.exists()
    (tmp_path / "unmounted").rename(tmp_path / "elsewhere")
    shutil.rmtree(run_dir)
    clean_up(scope_of(output, later=0, keep=1))
    assert noted.exists()
    clean_up(scope_of(output, keep=1))
    assert datasets(output) == {new}
    assert not noted.exists()


def test_no_data_is_removed_while_a_run_cannot_be_read(output, source):
    folders = grow(output, source, 2)
    run_dir = run_on(output, folders[0], "damaged")
    (run_dir / "run.json").write_text("{")
    cleaned = clean_up(scope_of(output, 30 * DAY, keep=1))
    assert "no data is removed" in cleaned.notes[0]
    assert datasets(output) == {*folders}


@pytest.mark.parametrize(("version", "stays"), [(2, False), (4, True)])
def test_an_older_format_goes_and_a_newer_one_stays(output, source, version, stays):
    old, new = grow(output, source, 2)
    tree = json.loads((old / "manifest.json").read_text())
    tree["format_version"] = version
    if version == 2:
        tree["ingredients"] = tree.pop("partitions")
    (old / "manifest.json").write_text(json.dumps(tree))
    (output / "datasets" / ".corpora").mkdir()
    clean_up(scope_of(output, keep=9))
    assert datasets(output) == ({old, new} if stays else {new})
    assert partitions(output) == (listed(new) | set(tree.get("partitions", ())))
    assert not (output / "datasets" / ".corpora").exists()


def test_a_damaged_manifest_keeps_what_it_may_refer_to(output, source):
    old, new = grow(output, source, 2)
    whole = partitions(output)
    (old / "manifest.json").write_text("{")
    cleaned = clean_up(scope_of(output, keep=1))
    assert cleaned.notes == [f"{old}: its manifest is damaged; left alone"]
    build_file(old).unlink()
    cleaned = clean_up(scope_of(output, keep=1))
    assert "a damaged manifest may refer to any of it" in cleaned.notes[1]
    assert datasets(output) == {old, new}
    assert partitions(output) == whole


def test_folders_of_strangers_stay(output, source):
    grow(output, source, 1)
    mine = output / "datasets" / "mine"
    mine.mkdir()
    (mine / "manifest.json").write_text("{}")
    (output / "datasets" / "notes.txt").write_text("not to be lost")
    before = state(output)
    assert clean_up(scope_of(output, 59 * DAY, keep=1)).counts == {}
    assert before.items() <= state(output).items()


def test_an_interrupted_build_keeps_its_partitions_for_a_week(output, source):
    folder = preprocess(config_of(output, source))
    shutil.rmtree(folder)
    whole = partitions(output)
    clean_up(scope_of(output, 6 * DAY))
    assert partitions(output) == whole
    with storage.lock(build_lock(folder)):  # Somebody works on it again.
        clean_up(scope_of(output, 30 * DAY))
    assert partitions(output) == whole
    clean_up(scope_of(output, 8 * DAY))
    assert partitions(output) == set()
    assert not list((output / "datasets" / ".builds").glob("*"))


def test_tokenizers_stay_while_a_name_or_a_dataset_has_them(output, source):
    for number in range(3):
        (source / f"{number}.txt").write_text(text(number, 40))
    fields = {"large": 40, "tokenizer": {"spec": "train", "vocab_size": 300}}
    old = grow(output, source, 1, **fields)[0]
    age(old, HOUR)
    fields["tokenizer"]["retrain"] = True
    middle, new = grow(output, source, 2, **fields)
    kept = output / "datasets" / ".tokenizers"
    assert len([path for path in kept.iterdir() if path.is_dir()]) == 4  # .locks is one
    clean_up(scope_of(output))
    assert datasets(output) == {middle, new}
    # The first text and the second give the same tokenizer, by its content.
    assert len([path for path in kept.iterdir() if path.is_dir()]) == 4
    clean_up(scope_of(output, keep=1))
    assert len([path for path in kept.iterdir() if path.is_dir()]) == 2
    assert preprocess(config_of(output, source, tokenizer=fields["tokenizer"])) == new


def list_download(output, folder, name="corpus", key="a" * 32):
    """A dataset of a file that was downloaded."""
    raw = output / "raw" / key
    raw.mkdir(parents=True)
    (raw / "0.txt").write_text(text(len(key)) + key)
    return preprocess(config_of(output, raw, name=name)), raw


def test_downloads_stay_with_the_datasets_made_from_them(output, source):
    old, its_raw = list_download(output, source, key="a" * 32)
    age(old, 60)
    new, new_raw = list_download(output, source, key="b" * 32)
    loose = output / "raw" / ("c" * 32)
    loose.mkdir()
    (loose / "part.txt.partial").write_text("half")
    (new_raw / "1.txt.partial").write_text("half")
    clean_up(scope_of(output))
    assert its_raw.exists()
    assert loose.exists()
    with storage.lock(output / "raw" / ".lock", shared=True):  # A download is under way.
        cleaned = clean_up(scope_of(output, 8 * DAY))
    assert "since one is under way" in cleaned.notes[0]
    assert its_raw.exists()
    assert loose.exists()
    clean_up(scope_of(output, 2 * HOUR, keep=1))
    assert loose.exists()
    assert not its_raw.exists()
    assert [path.name for path in (output / "datasets" / ".listings").iterdir()] == [
        json.loads(build_file(new).read_text())["listing"]
    ]
    clean_up(scope_of(output, 8 * DAY, keep=1))
    assert not loose.exists()
    assert [path.name for path in new_raw.iterdir()] == ["0.txt"]
    assert_intact(new)
    assert preprocess(config_of(output, new_raw)) == new


def test_downloads_of_an_older_version_stay(output):
    raw = output / "raw" / ("a" * 32)
    raw.mkdir(parents=True)
    (output / "datasets").mkdir()
    assert find_unneeded(scope_of(output, 99 * DAY)).items == []


def test_leftovers_of_killed_processes_go_but_those_of_living_ones_stay(output, source):
    (folder,) = grow(output, source, 1)
    place = output / "datasets"
    dead = place / f".tmp-{folder.name}-abc"
    dead.mkdir()
    with storage.lock(build_lock(folder)):
        clean_up(scope_of(output))
        assert dead.exists()
    young = place / ".listings" / ".tmp-corpus.json-abc"
    young.touch()
    clean_up(scope_of(output, later=0))
    assert not dead.exists()
    assert young.exists()
    clean_up(scope_of(output))
    assert not young.exists()


def test_locks_go_with_what_they_are_for_unless_somebody_holds_them(output, source):
    old, new = grow(output, source, 2)
    gone = sorted(listed(old) - listed(new))
    folder = output / "datasets" / ".partitions" / ".locks"
    (output / "datasets" / ".locks" / f"{old.name}.pull").touch()
    with storage.lock(folder / gone[0]):
        clean_up(scope_of(output, keep=1))
        assert {path.name for path in folder.iterdir()} == {gone[0], *listed(new)}
    clean_up(scope_of(output, later=0, keep=1))
    assert (folder / gone[0]).exists()  # It may be about to be taken.
    cleaned = clean_up(scope_of(output, keep=1))
    assert cleaned.counts == {Kind.LOCK: 1, Kind.PARTITION: 1}
    assert {path.name for path in folder.iterdir()} == listed(new)
    locks = {path.name for path in (output / "datasets" / ".locks").iterdir()}
    assert locks == {new.name, ".removals"}


def test_a_lock_that_is_taken_at_the_last_moment_stays(output, source, monkeypatch):
    old, new = grow(output, source, 2)
    folder = output / "datasets" / ".partitions"
    key = min(listed(old) - listed(new))
    rename = os.rename
    with contextlib.ExitStack() as stack, monkeypatch.context() as patch:

        def rename_and_begin(one, other):
            rename(one, other)
            if Path(one) == folder / key:
                stack.enter_context(storage.lock(folder / ".locks" / key))

        patch.setattr(os, "rename", rename_and_begin)
        clean_up(scope_of(output, keep=1))
        assert key not in partitions(output)
        assert storage.is_locked(folder / ".locks" / key)
    assert not storage.is_locked(folder / ".locks" / key)


def test_what_a_machine_remembers_goes_when_it_has_not_been_used_for_long(output, source):
    (folder,) = grow(output, source, 1)
    (facts,) = (output / "datasets" / ".remembered").glob("*.json")
    clean_up(scope_of(output, 59 * DAY))
    assert facts.exists()
    clean_up(scope_of(output, 61 * DAY))
    assert not facts.exists()
    assert_intact(folder)


def checkpoint(run_dir, step):
    folder = run_dir / "checkpoints" / f"step-{step}"
    with storage.atomic_folder(folder) as temporary:
        (temporary / "weights").write_bytes(bytes(9000))
        sums = {"weights": storage.sha256(temporary / "weights")}
        storage.dump_json(temporary / "manifest.json", {"sha256": sums})
    return folder


def test_only_finished_runs_lose_their_old_checkpoints(output, source):
    (dataset,) = grow(output, source, 1)
    runs = [run_on(output, dataset, name, finish=name != "cut") for name in ("done", "bad", "cut")]
    for run_dir in runs:
        for step in (3, 5, 7, 9):
            checkpoint(run_dir, step)
        lines = [
            {"step": step, "time": 1.0, "validation/loss": abs(step - 5)} for step in (3, 5, 9)
        ]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    done, bad, _ = runs
    (bad / "checkpoints" / "step-9" / "weights").write_bytes(b"damaged")
    (done / "checkpoints" / "damaged-step-8").mkdir()
    (done / "model").mkdir()
    with storage.lock(done / ".lock"):
        assert clean_up(scope_of(output)).counts == {}
    assert clean_up(scope_of(output, only="corpus")).counts == {}
    cleaned = clean_up(scope_of(output))
    assert cleaned.counts == {Kind.CHECKPOINT: 3}
    assert "the checkpoints before it are kept" in cleaned.notes[0]
    left = [{p.name for p in (run_dir / "checkpoints").glob("[!.]*")} for run_dir in runs]
    # The best one stays besides the newest.
    assert left == [{"step-5", "step-9"}, *[{f"step-{n}" for n in (3, 5, 7, 9)}] * 2]
    assert (done / "model").exists()


def test_what_cannot_be_removed_is_named_and_the_rest_goes(output, source, monkeypatch):
    old, middle, new = grow(output, source, 3)
    unlink, rename = os.unlink, os.rename

    def refuse_unlink(path, *args, **kwargs):
        if "train" in str(path) and old.name in str(path):
            raise PermissionError(1, "Operation not permitted")
        return unlink(path, *args, **kwargs)

    def refuse_rename(one, other, *args):
        if Path(one) == middle:
            raise PermissionError(13, "Permission denied")
        return rename(one, other, *args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse_unlink)
        patch.setattr(os, "rename", refuse_rename)
        cleaned = clean_up(scope_of(output, keep=1))
    assert f"{middle}: cannot be removed: Permission denied" in cleaned.failures
    assert len([line for line in cleaned.failures if "Operation not permitted" in line]) >= 1
    assert datasets(output) == {middle, new}
    assert_intact(middle, new)
    clean_up(scope_of(output, keep=1))
    assert datasets(output) == {new}
    assert not list(output.rglob(".tmp-*"))


def test_nothing_is_made_where_there_is_nothing(output):
    assert find_unneeded(scope_of(output)).items == []
    assert clean_up(scope_of(output)).bytes == 0
    assert not output.exists()


def begin_cleaning(output, moment=-1):
    """Clean in another process, which is killed before its n-th change; returns its id."""
    child = os.fork()
    if child:
        return child
    moments = itertools.count()

    def die(event, arguments):
        changes = ("os.rename", "os.remove", "os.rmdir")
        is_change = event in changes and str(arguments[0]).startswith(str(output))
        if is_change and next(moments) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(die)
        clean_up(scope_of(output, keep=1))
        os._exit(0)
    finally:
        os._exit(1)


def status_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_cleaning_killed_at_any_moment_is_finished_by_the_next(output, source, tmp_path):
    *_, last = grow(output, source, 3)
    copy, statuses = tmp_path / "copy", []
    for moment in itertools.chain(range(12), range(12, 60, 6)):
        shutil.rmtree(copy, ignore_errors=True)
        subprocess.run(["cp", "-a", output, copy], check=True)
        statuses.append(status_of(begin_cleaning(copy, moment)))
        new = copy / "datasets" / last.name
        assert_intact(*datasets(copy))
        clean_up(scope_of(copy, keep=1))
        assert_left(copy, new)
        assert not list(copy.rglob(".tmp-*"))
        if statuses[-1] == 0:
            break
    assert statuses.count(-signal.SIGKILL) > 15
    assert set(statuses) <= {-signal.SIGKILL, 0}


BUILDING = """
import itertools, sys
from pathlib import Path
from infini_model.config import load_config
from infini_model.data.shards.dataset import build_dataset
from infini_model.data.sources.download import download
output_dir = Path(sys.argv[1])
enough = Path(sys.argv[3])
for number in itertools.count():
    if number >= 8 and enough.exists():
        break
    source = Path(sys.argv[2])
    (source / "changing.txt").write_text(f"{number % 3} " * 300_000)
    data = {"name": "corpus", "workers": 2, "partition_megabytes": 1}
    data["source"] = {"paths": [str(source / "*.txt")]}
    config = load_config(overrides=[{"data": data}]).data
    build_dataset(download(config, output_dir), config, output_dir)
"""


class Hurried(Scope):
    """To whom all looks old, but for files that somebody writes at this moment under no lock."""

    def is_older(self, path, seconds):
        return not path.name.startswith(storage.TEMPORARY) and super().is_older(path, seconds)


def test_builds_and_cleanings_at_once_do_each_other_no_harm(output, source, tmp_path):
    """Nothing is protected by its age, only by what builds have noted and locked."""
    enough, log = tmp_path / "enough", tmp_path / "log"
    command = [sys.executable, "-c", BUILDING, output, source, enough]
    # Not a pipe: nobody reads it before the end, and a full one would halt the builder.
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, stderr=errors, stdout=subprocess.DEVNULL) as builder,
    ):
        removed = 0
        try:
            while builder.poll() is None:
                later = time.time() + 30 * DAY
                cleaned = clean_up(Hurried(output, output / "datasets", keep=1, now=later))
                assert cleaned.failures == []
                removed += cleaned.counts[Kind.PARTITION]
                if removed > 3:
                    enough.touch()
        finally:
            enough.touch()
        assert builder.returncode == 0, log.read_text()
    assert removed > 3
    assert_intact(*datasets(output))


def test_two_cleanings_at_once_do_no_harm(output, source):
    *_, last = grow(output, source, 4)
    both = [begin_cleaning(output) for _ in range(2)]
    assert [status_of(each) for each in both] == [0, 0]
    assert_left(output, last)
