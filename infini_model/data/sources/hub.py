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
# By the name of the hub's error, else by the HTTP status.
REFUSALS = {
    "GatedRepoError": f"is gated: ask for access on its page, then {LOGIN}",
    # The hub says 401 for a name that it does not know, since it may be private.
    "RepositoryNotFoundError": f"does not exist on the hub, or is private: {LOGIN}",
    "RevisionNotFoundError": "has no such revision",
    **dict.fromkeys(("401", "403"), f"access denied: {LOGIN}"),
    **dict.fromkeys(("404", "410"), "not found"),
}
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


def fetch_file(address: str) -> str:
    """The path of the file at an address, in the hub's cache; the hub is asked for it once.

    Raises `DataError` if the file does not exist or access is denied, `UnreachableError` if the hub
    does not answer, `UserError` on a full disk.
    """
    from huggingface_hub import constants, hf_hub_download, parse_hf_uri

    file = parse_hf_uri(address)

    def fetch() -> str:
        with hub_errors(address), storage.named_os_errors(Path(constants.HF_HUB_CACHE)):
            return hf_hub_download(
                file.id, file.path_in_repo, repo_type=file.type, revision=file.revision
            )

    # The hub's client goes on after a broken connection, but gives up where the hub is busy.
    for pause in PAUSES:
        with contextlib.suppress(UnreachableError):
            return fetch()
        time.sleep(pause)
    return fetch()


@contextlib.contextmanager
def open_ranges(address: str) -> Iterator[pa.NativeFile]:
    """Open the file at an address to read a part of it, such as a footer; fetches only that."""
    from huggingface_hub import HfFileSystem

    with hub_errors(address), HfFileSystem().open(address, cache_type="none") as opened:
        yield pa.PythonFile(opened, mode="r")


def fetch_tokenizer(name: str) -> Path:
    """The folder of a model's tokenizer.json and config.json, if any, in the hub's local cache.

    `name` may end in `@revision`. Raises `DataError` if the model does not exist,
    `UnreachableError` if the hub does not answer.
    """
    from huggingface_hub import snapshot_download

    repository, revision = split_revision(name)
    files = ["tokenizer.json", "config.json"]
    with hub_errors(f"tokenizer {name}"):
        return Path(snapshot_download(repository, revision=revision, allow_patterns=files))


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
            self._done = self._all = 0
            # The bar's own total grows as one file after the other is begun.
            for file in get_cached_repo_tree(repository, revision=commit):
                if "/" not in file.path and file.path.endswith(WEIGHTS):
                    here = try_to_load_from_cache(repository, file.path, revision=commit)
                    self._all += file.size
                    self._done += file.size if isinstance(here, str) else 0
            self._counts = name == BYTES_BAR

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
        from huggingface_hub.errors import HfHubHTTPError

        # The HTTP client has changed between versions; its base error is the base of this one.
        network_error = HfHubHTTPError.__bases__[0]
        if isinstance(error, HfHubHTTPError):
            status = error.response.status_code
            known = REFUSALS.get(type(error).__name__) or REFUSALS.get(str(status))
            is_final = 400 <= status < 500 and status not in BUSY
            reason = f"{known} (HTTP {status})" if known else f"HTTP {status}"
        else:
            is_final, reason = _is_mistake(error), _brief(error)
        if is_final:
            raise DataError(f"{what}: {reason}") from error
        if isinstance(error, (OSError, network_error)):
            raise UnreachableError(f"{what}: the hub cannot be reached: {reason}") from error
        raise


def _is_mistake(error: Exception) -> bool:
    """Whether an error tells what is wrong with a name, or with what stands in a dataset."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    kinds = (HFValidationError, FileNotFoundError, pa.ArrowInvalid, UnicodeDecodeError)
    return (
        # A file that is not in the cache, but may be on a hub that does not answer.
        (isinstance(error, kinds) and not isinstance(error, LocalEntryNotFoundError))
        # Arrow's error for a damaged file; those of a system have a number, the hub's a type.
        or (type(error) is OSError and error.errno is None)
        or type(error).__module__ in ABOUT_DATA
        or MISTAKES.match(str(error)) is not None
    )


def _brief(error: Exception) -> str:
    """An error in one line, without the queries of addresses: a signed address is a key."""
    # `datasets` says in its second line which configurations there are.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()][:2]
    return re.sub(r"(https?://[^\s'\"?]*)\?[^\s'\"]*", r"\1", " ".join(lines)) or repr(error)
