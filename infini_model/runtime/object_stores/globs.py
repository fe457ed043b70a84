"""Globs over the objects of a store: they match what they would match on a disk."""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Sequence

from infini_model.runtime.object_stores.object_store import (
    ObjectStore,
    StoredObject,
    split_address,
)


def matching(pattern: str) -> list[StoredObject]:
    """The objects that an address or a glob matches, sorted by address.

    A glob matches what it would match on a disk (`glob.glob`, recursive): `*` within one folder
    name, `**` any number of folders, neither what begins with a dot. All objects below the folders
    that stand before the first wildcard are listed.
    """
    root, key = split_address(pattern)
    store = ObjectStore(root)
    if not glob.has_magic(key):
        found = store.find(key) if key else None
        return [found] if found else []
    parts = key.split("/")
    fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    prefix = "/".join(parts[:fixed])
    return [
        each
        for each in store.list_below(prefix)
        if _matches(each.key.split("/")[fixed:], parts[fixed:])
    ]


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern or not names:
        return not pattern and not names
    if pattern[0] == "**":
        if len(pattern) == 1:
            return not any(name.startswith(".") for name in names)
        deeper = not names[0].startswith(".") and _matches(names[1:], pattern)
        return deeper or _matches(names, pattern[1:])
    hidden = names[0].startswith(".") and not pattern[0].startswith(".")
    same = not hidden and fnmatch.fnmatchcase(names[0], pattern[0])
    return same and _matches(names[1:], pattern[1:])
