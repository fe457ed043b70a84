"""The Hugging Face hub: commits, files, tokenizers and weights, in the hub's local cache."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from infini_model.runtime import storage
from infini_model.runtime.errors import BUSY, DataError, UnreachableError, UserError
from infini_model.runtime.stage_protocol import OnProgress

HUB = "hf://datasets/"
TIMEOUT = 60.0  # seconds
PAUSES = (1, 2, 4, 8, 8)  # seconds, before a file is asked for again
# Neither pickles nor code; copies in other layouts are in folders of their own.
WEIGHTS = (".safetensors", ".json")
# The name that `snapshot_download` gives its bar of the bytes that are written.
BYTES_BAR = "huggingface_hub.snapshot_download"
LOGIN = "log in (hf auth login) or set HF_TOKEN"
# `datasets` raises ValueError for a wrong configuration or split, RuntimeError for a script.
MISTAKES = re.compile(
    r"BuilderConfig .* not found|Config name is missing|Bad split|Dataset scripts are no longer"
)
# Where types of errors are defined that tell what is wrong with a dataset or a file of one.
ABOUT_DATA = ("datasets.exceptions", "datasets.table", "pandas.errors")


def split_revision(name: str) -> tuple[str, str | None]:
    """The repository and the revision, if any, of a name such as `team/model@main`."""
    repository, at, revision = name.partition("@")
    return repository, revision if at else None


def pin_repository(repository: str, revision: str | None, kind: Literal["dataset", "model"]) -> str:
    """The commit that a revision points at now, by default that of the default branch.

    The hub is not asked about a commit. Raises `DataError` for a repository or a revision that does
    not exist or may not be read, `UnreachableError` if the hub does not answer.
    """
    if revision and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionNotFoundError

    api, what = HfApi(), f"{kind} {repository}"
    with hub_errors(what):
        try:
            found = api.repo_info(repository, revision=revision, repo_type=kind, timeout=TIMEOUT)
        except RevisionNotFoundError as error:
            refs = api.list_repo_refs(repository, repo_type=kind)
            names = ", ".join(ref.name for ref in (*refs.branches, *refs.tags))
            raise DataError(f"{what}: has no revision {revision!r}; it has: {names}") from error
    if found.sha is None:
        raise DataError(f"{what}: the hub returned no commit")
    return found.sha


def address_of(repository: str, commit: str, path: str) -> str:
    """The address of a file of a dataset repository at a commit, as `HfFileSystem` writes it."""
    return f"{HUB}{repository}@{commit}/{path}"


def fetch_file(address: str) -> Path:
    """The file at an address of `address_of`, in the hub's cache; the hub is asked for it once.

    Raises `DataError` if the file does not exist or access is denied, `UnreachableError` if the hub
    does not answer, `UserError` on a full disk.
    """
    from huggingface_hub import constants, hf_hub_download

    parts = re.fullmatch(rf"{HUB}([^@]+)@([^/]+)/(.+)", address)
    if parts is None:
        raise DataError(f"{address}: is not the address of a file at a commit of the hub")
    repository, commit, path = parts.groups()
    pauses = iter(PAUSES)
    while True:
        try:
            with hub_errors(address), storage.named_os_errors(Path(constants.HF_HUB_CACHE)):
                return Path(hf_hub_download(repository, path, repo_type="dataset", revision=commit))
        except UnreachableError:
            # The hub's client goes on after a broken connection, but gives up where it is refused.
            pause = next(pauses, None)
            if pause is None:
                raise
            time.sleep(pause)


@contextlib.contextmanager
def open_ranges(address: str) -> Iterator[pa.NativeFile]:
    """Open the file at an address to look at a part of it, such as a footer; fetches only that."""
    from huggingface_hub import HfFileSystem

    with hub_errors(address), HfFileSystem().open(address, cache_type="none") as opened:
        yield pa.PythonFile(opened, mode="r")


def fetch_tokenizer(name: str) -> Path:
    """The folder of a model's tokenizer.json, or else config.json, in the hub's local cache.

    `name` may end in `@revision`. Raises `DataError` if the model or the file does not exist,
    `UnreachableError` if the hub does not answer.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    repository, revision = split_revision(name)
    with hub_errors(f"tokenizer {name}"):
        try:
            return Path(hf_hub_download(repository, "tokenizer.json", revision=revision)).parent
        except RemoteEntryNotFoundError:
            return Path(hf_hub_download(repository, "config.json", revision=revision)).parent


def fetch_weights(repository: str, commit: str, progress: OnProgress | None = None) -> Path:
    """The folder of a model's safetensors and JSON files, in the hub's local cache.

    What is there already is not fetched again, nor is the hub asked for it; `progress(done, total)`
    counts its bytes as done.

    Raises `DataError` if the model does not exist or has no safetensors, `UnreachableError` if the
    hub does not answer, `UserError` on a full disk.
    """
    from huggingface_hub import constants, snapshot_download

    cache = Path(constants.HF_HUB_CACHE)
    with hub_errors(f"model {repository}"), storage.named_os_errors(cache):
        _remove_leftovers(cache, repository)
        folder = snapshot_download(
            repository,
            revision=commit,
            allow_patterns=[f"*{suffix}" for suffix in WEIGHTS],
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


def _bars(repository: str, commit: str, progress: OnProgress) -> type[Any]:
    """A class for the bars of `snapshot_download`: it draws none and reports the bytes."""
    from huggingface_hub import get_cached_repo_tree, try_to_load_from_cache
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        def __init__(self, *args: Any, name: str | None = None, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})  # type: ignore[no-untyped-call]
            self._counts = name == BYTES_BAR
            if self._counts:
                # The bar's own total grows as one file after the other is begun.
                tree = get_cached_repo_tree(repository, revision=commit)
                sizes = {
                    file.path: file.size
                    for file in tree
                    if "/" not in file.path and file.path.endswith(WEIGHTS)
                }
                self._all = sum(sizes.values())
                self._done = sum(
                    size
                    for path, size in sizes.items()
                    if isinstance(try_to_load_from_cache(repository, path, revision=commit), str)
                )

        def update(self, n: float | None = 1) -> None:
            if self._counts:
                with self.get_lock():
                    self._done += int(n or 0)
                    progress(self._done, max(self._done, self._all))

    return Bar


@contextlib.contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Tell a refusal, which is final, from a hub that does not answer, which is worth a retry.

    Raises `DataError` and `UnreachableError` in one line that starts with `what`. What neither the
    hub nor `datasets` says of a name or a file is raised as it is.
    """
    try:
        yield
    except (UserError, UnreachableError):
        raise
    except Exception as error:
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        # The HTTP client has changed between versions; its base error is the base of this one.
        network_error = HfHubHTTPError.__bases__[0]
        if isinstance(error, HfHubHTTPError):
            status = error.response.status_code
            final, reason = 400 <= status < 500 and status not in BUSY, _refusal(error, status)
        else:
            final, reason = _is_mistake(error), _brief(error)
        if final and not isinstance(error, LocalEntryNotFoundError):
            raise DataError(f"{what}: {reason}") from error
        if isinstance(error, (OSError, network_error)):
            raise UnreachableError(f"{what}: the hub cannot be reached: {reason}") from error
        raise


def _is_mistake(error: Exception) -> bool:
    """Whether an error tells what is wrong with a name, or with what stands in a dataset."""
    from huggingface_hub.errors import HFValidationError

    kinds = (HFValidationError, FileNotFoundError, pa.ArrowInvalid, UnicodeDecodeError)
    return (
        isinstance(error, kinds)
        # Arrow's error for a damaged file; those of a system have a number, the hub's a type.
        or (type(error) is OSError and error.errno is None)
        or type(error).__module__ in ABOUT_DATA
        or MISTAKES.match(str(error)) is not None
    )


def _refusal(error: Any, status: int) -> str:
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return f"is gated: ask for access on its page, then {LOGIN} (HTTP {status})"
    # The hub says 401 for a name that it does not know, since it may be private.
    if isinstance(error, RepositoryNotFoundError):
        return f"does not exist on the hub, or is private: {LOGIN} (HTTP {status})"
    if isinstance(error, RevisionNotFoundError):
        return f"has no such revision (HTTP {status})"
    if status in (401, 403):
        return f"access denied: {LOGIN} (HTTP {status})"
    return f"not found (HTTP {status})" if status in (404, 410) else f"HTTP {status}"


def _brief(error: Exception) -> str:
    """An error in one line, without the queries of addresses: a signed address is a key."""
    # `datasets` says in its second line which configurations there are.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()][:2]
    return re.sub(r"(https?://[^\s'\"?]*)\?[^\s'\"]*", r"\1", " ".join(lines)) or repr(error)
