"""Downloaded files and the listings that name them: which of them nothing refers to.

A listing is needed by the datasets that were made from it, a download by the listings. What no
dataset was made from yet is kept for some days, so that an interrupted preprocess goes on from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from infini_model.cleaning.datasets import Contents
from infini_model.cleaning.unneeded import (
    RECENT_SECONDS,
    UNFINISHED_SECONDS,
    Findings,
    Kind,
    Scope,
    leftovers,
    visible,
)
from infini_model.runtime.storage import is_locked

# Length of what follows a dataset's name in the name of a listing: a dash and a key.
KEY_LENGTH = 17


def unneeded_downloads(scope: Scope, contents: Contents) -> Findings:
    """The listings that no dataset needs, and the downloads that no other listing names."""
    found = Findings()
    kept_listings = visible(scope.datasets_dir / ".listings")
    listings = [path for path in kept_listings if path.is_file()]
    # Of hub datasets, by commit: one that is missing is asked for again.
    by_commit = visible(scope.datasets_dir / ".listings" / "hub")
    found.add(Kind.RECORD, *(p for p in by_commit if scope.is_older(p, UNFINISHED_SECONDS)))
    unneeded = [path for path in listings if not _is_needed(path, scope, contents)]
    found.add(Kind.RECORD, *unneeded)
    found.add(Kind.LEFTOVER, *leftovers(scope.output_dir / "raw", scope))
    folders = visible(scope.output_dir / "raw")
    # Without any listing, the downloads are those of an older version: nothing is known of them.
    if not folders or not listings:
        return found
    elsewhere = visible(scope.output_dir / "datasets" / ".listings")
    kept = {*listings, *(path for path in elsewhere if path.is_file())} - {*unneeded}
    try:
        needed, former = _named_by(kept), _named_by(unneeded)
    except (OSError, ValueError, LookupError, TypeError) as error:
        found.notes.append(f"{scope.output_dir / 'raw'}: kept, since a listing is damaged: {error}")
        return found
    for folder in folders:
        if _is_downloading(folder):
            continue
        age = RECENT_SECONDS if folder.name in former else UNFINISHED_SECONDS
        if folder.name in needed:
            found.add(Kind.LEFTOVER, *_unfinished(folder, scope))
        elif all(scope.is_older(path, age) for path in [folder, *folder.rglob("*")]):
            found.add(Kind.RAW, folder)
    return found


def _is_needed(listing: Path, scope: Scope, contents: Contents) -> bool:
    """Whether a dataset was made from this listing, or may be soon."""
    if listing.name in {build.listing for build in contents.live.values()}:
        return True
    is_former = listing.name in {build.listing for build in contents.dead.values()}
    if not scope.is_older(listing, RECENT_SECONDS if is_former else UNFINISHED_SECONDS):
        return True
    # What a dataset without a note was made from is not known.
    name = listing.stem[:-KEY_LENGTH]
    return any(d.name == name and d.folder.name not in contents.live for d in contents.kept)


def _named_by(listings: Iterable[Path]) -> set[str]:
    """All names in the paths of the listed files, among them those of the download folders.

    A name is the key of what was downloaded, so it is enough, even if the output folder was moved.
    Raises `OSError`, `ValueError`, `LookupError` or `TypeError` for a damaged listing.
    """
    return {
        part
        for path in listings
        for listed in json.loads(path.read_bytes())["ranges"]
        for part in Path(listed["file"]["address"]).parts
    }


def _is_downloading(folder: Path) -> bool:
    return is_locked(folder / ".lock") or is_locked(folder.parent / ".locks" / folder.name)


def _unfinished(folder: Path, scope: Scope) -> Iterator[Path]:
    """What downloads have begun in a folder and nobody is going to finish."""
    for path in sorted(folder.glob("*.partial")):
        if scope.is_older(path, UNFINISHED_SECONDS):
            yield path
    yield from leftovers(folder, scope)
