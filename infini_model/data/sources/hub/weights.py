"""The weights of a model on the hub, fetched into the hub's local cache."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from infini_model.data.sources.documents import Progress
from infini_model.data.sources.hub.access import hub_errors
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError, UserError

# The name that `snapshot_download` gives its bar of the bytes that are written.
BYTES_BAR = "huggingface_hub.snapshot_download"
SUFFIXES = (".safetensors", ".json")


def fetch_weights(repository: str, commit: str, progress: Progress | None = None) -> Path:
    """The folder of a model's safetensors and JSON files, kept in the hub's local cache.

    What is there already is not fetched again, nor is the hub asked for it; `progress(done, total)`
    counts its bytes as done.

    Raises `DataError` if the model does not exist or has no safetensors, `UnreachableError` if the
    hub does not answer, `UserError` on a full disk.
    """
    from huggingface_hub import constants, snapshot_download

    cache = Path(constants.HF_HUB_CACHE)
    with hub_errors(f"model {repository}"), storage.named_os_errors(cache):
        _remove_leftovers(cache, repository)
        # Neither pickles nor code, nor copies in other layouts, which are in folders of their own.
        folder = snapshot_download(
            repository,
            revision=commit,
            allow_patterns=[f"*{suffix}" for suffix in SUFFIXES],
            ignore_patterns=["*/*"],
            tqdm_class=None if progress is None else _bars(repository, commit, progress),
        )
    if not any(Path(folder).glob("*.safetensors")):
        raise DataError(
            f"model {repository}: has no .safetensors files at {commit[:12]}; weights in other "
            "formats, such as .bin, are not read"
        )
    return Path(folder)


def _remove_leftovers(cache: Path, repository: str) -> None:
    """Remove what killed downloads of a model have left: the hub's client never resumes them."""
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=repository, repo_type="model")
    for path in (cache / folder / "blobs").glob("*.incomplete"):
        # Whoever downloads a file, also another program, holds the lock of its entity tag.
        lock = cache / ".locks" / folder / f"{path.name.partition('.')[0]}.lock"
        # In a cache that several users share, it may be another one's to remove.
        with contextlib.suppress(OSError, UserError), storage.lock(lock, wait=False) as free:
            if free:
                path.unlink()


def _bars(repository: str, commit: str, progress: Progress) -> type[Any]:
    """A class for the bars of `snapshot_download`: it draws none and reports the bytes."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        def __init__(self, *args: Any, name: str | None = None, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})  # type: ignore[no-untyped-call]
            self._counts = name == BYTES_BAR
            if self._counts:
                # The bar's own total grows as one file after the other is begun.
                self._done, self._all = _sizes(repository, commit)

        def update(self, n: float | None = 1) -> None:
            if not self._counts:
                return
            with self.get_lock():
                self._done += int(n or 0)
                progress(self._done, max(self._done, self._all))

    return Bar


def _sizes(repository: str, commit: str) -> tuple[int, int]:
    """The bytes of the files in the cache, and of all; from the listing that is kept there."""
    from huggingface_hub import get_cached_repo_tree, try_to_load_from_cache

    cached = total = 0
    for file in get_cached_repo_tree(repository, revision=commit):
        if "/" in file.path or not file.path.endswith(SUFFIXES):
            continue
        total += file.size
        if isinstance(try_to_load_from_cache(repository, file.path, revision=commit), str):
            cached += file.size
    return cached, total
