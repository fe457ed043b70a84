"""The datasets of a folder: which of them are superseded, and what they leave behind.

Nothing is removed here. What is found under the lock of `infini_model.data.builds.removals` stays
true while that is held.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from infini_model.cleaning.unneeded import (
    RECENT_SECONDS,
    UNFINISHED_SECONDS,
    Findings,
    Kind,
    Scope,
    leftovers,
    visible,
)
from infini_model.data.builds import Build, build_file, build_lock, read_builds
from infini_model.data.keeping.holds import held_partitions
from infini_model.data.manifest import FORMAT_VERSION
from infini_model.runtime.errors import UserError
from infini_model.runtime.remembered import KEEP_SECONDS
from infini_model.runtime.storage import MANIFEST, is_locked

# Formats before this one had partitions by documents, which no later program reads.
FIRST_WITH_PARTITIONS = 3
# NAME-KEY; any other folder is not ours.
FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*-[0-9a-f]{16}")


class Dataset(NamedTuple):
    """A finished dataset of any format version; `used` is when it was made or last asked for."""

    folder: Path
    name: str
    version: int
    partitions: frozenset[str]
    tokenizer: str
    used: float


class Contents(NamedTuple):
    """The datasets of a folder, sorted by what becomes of them.

    Attributes:
        kept: Those that stay.
        superseded: Those that nothing refers to.
        unreadable: Folders with a damaged manifest, which stay as they are.
        live: What the datasets that stay, and those that are being made, are made from.
        dead: The same of those that do not, and of builds that were given up long ago.
    """

    kept: list[Dataset]
    superseded: list[Dataset]
    unreadable: list[Path]
    live: dict[str, Build]
    dead: dict[str, Build]


def read_contents(scope: Scope, needed: Collection[str]) -> Contents:
    """The datasets of a folder, of which those that are `needed`, by name, stay."""
    datasets, unreadable = _read_datasets(scope.datasets_dir)
    latest = scope.datasets_dir / "latest"
    needed = {*needed, latest.resolve().name}
    needed |= {d.folder.name for d in datasets if is_locked(build_lock(d.folder))}
    superseded = superseded_datasets(datasets, needed, scope)
    gone = {dataset.folder for dataset in superseded}
    builds = dict(read_builds(scope.datasets_dir))
    live = {
        folder: build
        for folder, build in builds.items()
        if folder not in gone and (folder.exists() or _is_being_built(folder, scope))
    }
    return Contents(
        [dataset for dataset in datasets if dataset.folder not in gone],
        superseded,
        unreadable,
        {folder.name: build for folder, build in live.items()},
        {folder.name: build for folder, build in builds.items() if folder not in live},
    )


def superseded_datasets(
    datasets: Iterable[Dataset], needed: Collection[str], scope: Scope
) -> list[Dataset]:
    """Those that are not needed, not recent, and not among the newest of their name.

    A dataset of an older format counts as none of the newest, since it cannot be read any more; one
    of a newer format belongs to a newer program.
    """
    ordered = sorted(datasets, key=lambda dataset: (dataset.used, dataset.folder), reverse=True)
    newest: dict[str, int] = {}
    found = []
    for dataset in ordered:
        is_newest = False
        if dataset.version == FORMAT_VERSION:
            newest[dataset.name] = newest.get(dataset.name, 0) + 1
            is_newest = newest[dataset.name] <= scope.keep
        stays = (
            is_newest
            or dataset.version > FORMAT_VERSION
            or dataset.folder.name in needed
            or scope.now - dataset.used <= RECENT_SECONDS
            or scope.only not in (None, dataset.name)
        )
        if not stays:
            found.append(dataset)
    return found


def unneeded_data(scope: Scope, contents: Contents) -> Findings:
    """The superseded datasets, and the partitions, tokenizers and records nothing refers to."""
    found = Findings()
    found.add(Kind.DATASET, *(dataset.folder for dataset in contents.superseded))
    found.notes += [f"{path}: its manifest is damaged; left alone" for path in contents.unreadable]
    found += _unneeded_partitions(scope, contents)
    found += _unneeded_tokenizers(scope, contents)
    notes = (build_file(scope.datasets_dir / name) for name in contents.dead)
    found.add(Kind.RECORD, *notes)
    found += _leftovers(scope)
    found.add(Kind.LOCK, *_unneeded_locks(scope, found))
    return found


def _read_datasets(datasets_dir: Path) -> tuple[list[Dataset], list[Path]]:
    """The datasets, and the folders whose manifest is damaged; any other folder is not ours."""
    datasets, unreadable = [], []
    for folder in visible(datasets_dir):
        if folder.is_symlink() or not FOLDER_NAME.fullmatch(folder.name):
            continue
        if not (folder / MANIFEST).is_file():
            continue
        try:
            datasets.append(_read_dataset(folder))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            unreadable.append(folder)
    return datasets, unreadable


def _read_dataset(folder: Path) -> Dataset:
    """A dataset of any format. Raises if its manifest is damaged, or another folder's."""
    tree = json.loads((folder / MANIFEST).read_bytes())
    if folder.name != f"{tree['name']}-{tree['key'][:16]}":
        raise ValueError(folder.name)
    version = int(tree["format_version"])
    partitions = tree["partitions"] if version >= FIRST_WITH_PARTITIONS else ()
    fingerprint = str(tree["tokenizer"].get("fingerprint"))
    used = max(_written(folder / MANIFEST), _written(build_file(folder)))
    return Dataset(folder, tree["name"], version, frozenset(partitions), fingerprint, used)


def _written(path: Path) -> float:
    """When a file was written, in seconds since the epoch; 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _is_being_built(folder: Path, scope: Scope) -> bool:
    """Whether a dataset that does not exist yet is being made, or may soon be gone on with."""
    recent = not scope.is_older(build_file(folder), UNFINISHED_SECONDS)
    return recent or is_locked(build_lock(folder))


def staged_copies(scope: Scope) -> Path:
    """The folder of the shards that were copied from an object store, by partition."""
    return scope.datasets_dir / ".staged"


def _unneeded_partitions(scope: Scope, contents: Contents) -> Findings:
    """Partitions, and copies of them, that nothing is made from and that nobody uses."""
    folder, copies = scope.datasets_dir / ".partitions", staged_copies(scope)
    found = Findings()
    needed = {key for build in contents.live.values() for key in build.partitions}
    needed |= {key for dataset in contents.kept for key in dataset.partitions}
    if any(path.name not in contents.live for path in contents.unreadable):
        found.notes.append(f"{folder}: kept, since a damaged manifest may refer to any of it")
        return found
    former = {key for dataset in contents.superseded for key in dataset.partitions}
    held = held_partitions(copies)
    for path in [*visible(folder), *visible(copies)]:
        in_use = held if path.parent == copies else ()
        is_made = is_locked(folder / ".locks" / path.name)
        if path.name in needed or path.name in in_use or is_made:
            continue
        # One that no dataset lists may have just been made by somebody who noted no build.
        if path.name in former or scope.is_older(path, RECENT_SECONDS):
            found.add(Kind.PARTITION, path)
    return found


def _unneeded_tokenizers(scope: Scope, contents: Contents) -> Findings:
    folder = scope.datasets_dir / ".tokenizers"
    found = Findings()
    if any(map(is_locked, (folder / ".locks").glob("*"))):
        return found
    paths = visible(folder)
    pinned = {_pinned(path) for path in paths if path.suffix == ".json"}
    if None in pinned:
        found.notes.append(f"{folder}: kept, since a damaged record may refer to any of it")
        return found
    in_use = {dataset.tokenizer for dataset in contents.kept}
    for path in paths:
        is_loose = path.is_dir() and path.name not in pinned
        if is_loose and scope.is_older(path, RECENT_SECONDS) and _fingerprint(path) not in in_use:
            found.add(Kind.TOKENIZER, path)
    return found


def _pinned(path: Path) -> str | None:
    """The folder of the tokenizer that a record pins; None if the record is damaged."""
    try:
        return str(json.loads(path.read_bytes())["key"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _fingerprint(folder: Path) -> str | None:
    from infini_model.data.tokenizers.load import load_saved

    try:
        return load_saved(folder, "train").fingerprint
    except UserError:
        return None


def _unneeded_locks(scope: Scope, going: Findings) -> Iterator[Path]:
    """The locks of datasets and partitions that are gone, or that this cleaning removes."""
    removed = {path for _, path in going.items}
    for place in (scope.datasets_dir, scope.datasets_dir / ".partitions"):
        staying = {path.name for path in visible(place) if path not in removed}
        for path in visible(place / ".locks"):
            is_of_none = path.name.removesuffix(".pull") not in staying
            if is_of_none and scope.is_older(path, RECENT_SECONDS) and not is_locked(path):
                yield path


def _leftovers(scope: Scope) -> Findings:
    """What killed processes, machines that are gone and older versions have left."""
    found = Findings()
    root = scope.datasets_dir
    places = ("", "partitions", "staged", "tokenizers", "listings", "builds", "remembered", "runs")
    for name in (*(f".{place}" for place in places), ".locks", ".partitions/.locks"):
        found.add(Kind.LEFTOVER, *leftovers(root / name, scope))
    # A machine that needs its facts writes them once a week. These it would drop by itself.
    facts = (root / ".remembered").glob("*.json")
    found.add(Kind.RECORD, *(path for path in facts if scope.is_older(path, KEEP_SECONDS)))
    corpora = root / ".corpora"
    is_idle = not any(map(is_locked, (corpora / ".locks").glob("*")))
    if is_idle and scope.is_older(corpora, RECENT_SECONDS):
        found.add(Kind.LEFTOVER, corpora)
    return found
