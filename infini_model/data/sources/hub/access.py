"""Asking the hub: the commit of a revision, a tokenizer, and errors in one line."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from infini_model.config import HubSource
from infini_model.runtime import storage
from infini_model.runtime.errors import BUSY, DataError, UnreachableError, UserError

TIMEOUT = 60.0  # seconds


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


def split_revision(name: str) -> tuple[str, str | None]:
    """The repository and the revision, if any, of a name such as `team/model@main`."""
    repository, at, revision = name.partition("@")
    return repository, revision if at else None


def pin(source: HubSource) -> str:
    """The commit that the revision points at now; for a local folder, a hash of its files.

    Raises `DataError` for a repository or a revision that does not exist or may not be read,
    `UnreachableError` if the hub does not answer.
    """
    folder = Path(source.repository)
    if folder.is_dir():
        return _hash_of(folder)
    return pin_repository(source.repository, source.revision, "dataset")


def pin_repository(repository: str, revision: str | None, kind: Literal["dataset", "model"]) -> str:
    """The commit that a revision points at now, by default that of the default branch.

    Raises as `pin` does. The hub is not asked about a commit.
    """
    if revision and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionNotFoundError

    what = f"{kind} {repository}"
    with hub_errors(what):
        try:
            commit = (
                HfApi()
                .repo_info(repository, revision=revision, repo_type=kind, timeout=TIMEOUT)
                .sha
            )
        except RevisionNotFoundError as error:
            refs = HfApi().list_repo_refs(repository, repo_type=kind)
            names = ", ".join(ref.name for ref in (*refs.branches, *refs.tags))
            raise DataError(f"{what}: has no revision {revision!r}; it has: {names}") from error
    if commit is None:
        raise DataError(f"{what}: the hub returned no commit")
    return commit


def _hash_of(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder)} {storage.sha256(path)}\n".encode())
    return digest.hexdigest()


@contextlib.contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Tell a refusal, which is final, from a hub that does not answer, which is worth a retry.

    Raises `DataError` and `UnreachableError` in one line that starts with `what`.
    """
    try:
        yield
    except (UserError, UnreachableError):
        raise
    except Exception as error:
        from huggingface_hub.errors import (
            EntryNotFoundError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )

        # The HTTP client has changed between versions; its base error is the base of this one.
        network_error = HfHubHTTPError.__bases__[0]
        if isinstance(error, HfHubHTTPError):
            status = error.response.status_code
            final = 400 <= status < 500 and status not in BUSY
            reason = _refusal(error, status)
        else:
            final = isinstance(
                error, HFValidationError | EntryNotFoundError | FileNotFoundError
            ) and not isinstance(error, LocalEntryNotFoundError)
            reason = _brief(error)
        # A wrong split or configuration raises ValueError, a dataset script RuntimeError.
        if final or isinstance(error, ValueError | RuntimeError | KeyError):
            raise DataError(f"{what}: {reason}") from error
        if isinstance(error, (OSError, network_error)):
            raise UnreachableError(f"{what}: the hub cannot be reached: {reason}") from error
        raise


def _refusal(error: Any, status: int) -> str:
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    advice = "log in (hf auth login) or set HF_TOKEN"
    if isinstance(error, GatedRepoError):
        return f"is gated: ask for access on its page, then {advice} (HTTP {status})"
    # The hub says 401 for a name that it does not know, since it may be private.
    if isinstance(error, RepositoryNotFoundError):
        return f"does not exist on the hub, or is private: {advice} (HTTP {status})"
    if isinstance(error, RevisionNotFoundError):
        return f"has no such revision (HTTP {status})"
    if status in (401, 403):
        return f"access denied: {advice} (HTTP {status})"
    return f"not found (HTTP {status})" if status in (404, 410) else f"HTTP {status}"


def _brief(error: Exception) -> str:
    """An error in one line, without the queries of addresses: a signed address is a key."""
    # `datasets` says in its second line which configurations there are.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()][:2]
    return re.sub(r"(https?://[^\s'\"?]*)\?[^\s'\"]*", r"\1", " ".join(lines)) or repr(error)
