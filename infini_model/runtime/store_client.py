"""The client of an object store, what of its failures is repeated, and how the rest is told.

obstore repeats a request by itself as long as its store is to have patience with it. Two things it
does not: a listing that is cut, and the first request of an upload. `with_retries` does.

What obstore says of a failure holds signed addresses and whole replies. Nothing of it is shown but
the HTTP status and the store's error code; the rest is told in the words of this module.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from infini_model.config.locations import STORES
from infini_model.runtime.errors import (
    BUSY,
    ObjectChangedError,
    ObjectMissingError,
    StoreError,
    UnreachableError,
    UserError,
)

T = TypeVar("T")

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
ENDPOINT = re.compile(r"(https?)://([\w.-]+|\[[0-9a-fA-F:]+\])(:\d{1,5})?(/[\w./-]*)?")
# Given any option of the client, obstore no longer reads these from the environment.
CLIENT_OPTIONS = (
    *("allow_http", "allow_invalid_certificates"),
    *("proxy_url", "proxy_ca_certificate", "proxy_excludes"),
)
CONNECT_TIMEOUT = timedelta(seconds=10)
# How long a connection may be silent. A request as a whole may take longer: a slow line is no
# failure.
SILENT_TIMEOUT = timedelta(seconds=30)
REQUEST_TIMEOUT = timedelta(hours=1)
LONGEST_PAUSE = timedelta(seconds=5)
PAUSE_SECONDS = 0.5
MANY = 1000  # retries, which are limited by time
HAS_RETRIED = re.compile(r"after [1-9]\d* retries")
STATUS = re.compile(r"status code: (\d{3})")
CODE = re.compile(r"<Code>(\w+)</Code>")
AWAY = "cannot be reached: "
UNSAFE = "the connection would not be safe: check the certificate"
# What a failure says, and how it is told; the first that fits counts.
CAUSES: tuple[tuple[str, type[Exception], str], ...] = (
    # Busy, or any other fault of its own but 501: not implemented.
    (
        rf"status code: ({'|'.join(map(str, BUSY))}|5(?!01)\d\d)",
        UnreachableError,
        AWAY + "the store answers {answer}",
    ),
    # Instance metadata, which is asked for credentials when the environment has none.
    (
        r"(?s)\A((?!status code).)*(169\.254\.\d|metadata\.google)",
        StoreError,
        "no credentials in the environment ({prefix}…)",
    ),
    ("NoSuchBucket|ContainerNotFound|bucket does not exist", StoreError, "there is no such bucket"),
    ("status code: 404", ObjectMissingError, "not found"),
    ("status code: 412", ObjectChangedError, "changed while it was read; run again"),
    ("status code: 40[13]", StoreError, "access denied ({answer}); check the credentials"),
    (r"status code: \d{3}", StoreError, "the store refuses the request ({answer})"),
    ("certificate|BadScheme|builder error", StoreError, UNSAFE),
    ("Connection ?refused", UnreachableError, AWAY + "connection refused"),
    ("lookup address|dns error", UnreachableError, AWAY + "its name cannot be resolved"),
    ("TimedOut|timed out|kind: Timeout", UnreachableError, AWAY + "no answer in time"),
    ("unreachable", UnreachableError, AWAY + "no route to it"),
    ("HTTP error|HttpError", UnreachableError, AWAY + "the connection was cut"),
    ("path segment", StoreError, "a key with an empty or dotted folder name cannot be read"),
)
_used_by: int | None = None


def client(root: str, patience: float) -> Any:
    """The obstore client of `root`, such as `s3://bucket`, as the environment now describes it.

    Threads share it, and its connections. `patience` is how long it repeats what fails, in seconds.

    Raises `UserError` if obstore is not installed or the environment is wrong, `RuntimeError` in a
    forked process, where obstore would hang.
    """
    global _used_by
    if _used_by not in (None, os.getpid()):
        raise RuntimeError("object stores cannot be used after a fork: spawn the process instead")
    _used_by = os.getpid()
    _check_endpoint(root)
    prefix = STORES[root[:5]]
    environment = ((name, text) for name, text in os.environ.items() if name.startswith(prefix))
    return _make_client(root, patience, tuple(sorted(environment)))


def _check_endpoint(root: str) -> None:
    """Raise `StoreError` for a server that obstore would panic at, or refuse without a reason."""
    name = next((name for name in ENDPOINTS if os.environ.get(name)), None)
    if name is None or not root.startswith("s3://"):
        return
    endpoint, place = os.environ[name], f"{root}: {name} in the environment"
    found = ENDPOINT.fullmatch(endpoint)
    if found is None:
        raise StoreError(f"{place} is not like https://host:port")
    if found[1] == "http" and os.environ.get("AWS_ALLOW_HTTP", "").lower() not in ("true", "1"):
        raise StoreError(f"{place} is not encrypted; allow it by AWS_ALLOW_HTTP=true")


@functools.lru_cache(maxsize=16)
def _make_client(root: str, patience: float, environment: tuple[tuple[str, str], ...]) -> Any:
    try:
        # All of it: while another thread imports it, its module `store` is there before the rest.
        import obstore
    except ImportError as error:
        raise UserError(f"{root}: needs obstore: pip install obstore") from error
    prefix = STORES[root[:5]]
    given = {name.removeprefix(prefix).lower(): text for name, text in environment}
    options: dict[str, Any] = {name: given[name] for name in CLIENT_OPTIONS if name in given}
    options |= {"connect_timeout": CONNECT_TIMEOUT, "read_timeout": SILENT_TIMEOUT}
    options["timeout"] = REQUEST_TIMEOUT
    retries = {
        "max_retries": MANY if patience else 0,
        "retry_timeout": timedelta(seconds=patience),
        "backoff": {"max_backoff": LONGEST_PAUSE},
    }
    return obstore.store.from_url(root, client_options=options, retry_config=retries)


def with_retries(address: str, patience: float, request: Callable[[], T]) -> T:
    """The result of `request`, repeated for `patience` seconds while obstore does not do so itself.

    Raises what `explain_error` makes of its last failure.
    """
    deadline: float | None = None
    while True:
        try:
            return request()
        except Exception as error:
            failure = explain_error(error, address)
            if failure is error:
                raise
            is_final = not isinstance(failure, UnreachableError) or HAS_RETRIED.search(str(error))
        now = time.monotonic()
        deadline = now + patience if deadline is None else deadline
        # Raised out of the handler, so that obstore's error is in no traceback either.
        if is_final or now >= deadline:
            raise failure
        time.sleep(PAUSE_SECONDS)


def explain_error(error: Exception, address: str) -> Exception:
    """What a failure of obstore means, in one line that names `address`; others as they are."""
    text = str(error)
    # Our own errors come first: without obstore there are none of its own.
    if isinstance(error, UserError | UnreachableError) or not _is_from_obstore(error, text):
        return error
    status, code = STATUS.search(text), CODE.search(text)
    answer = (f"HTTP {status[1]}" if status else "") + (f", {code[1]}" if code else "")
    for pattern, kind, reason in CAUSES:
        if re.search(pattern, text):
            return kind(f"{address}: {reason.format(answer=answer, prefix=STORES[address[:5]])}")
    # Of the environment, mostly; without addresses, which may hold a password.
    reason = re.sub(r"\S*://\S*", "…", text.partition("\n")[0])
    return StoreError(f"{address}: {reason}")


def _is_from_obstore(error: Exception, text: str) -> bool:
    from obstore.exceptions import BaseError

    # Some of its errors are Python's own types; those of the operating system have a number.
    is_missing = isinstance(error, FileNotFoundError) and error.errno is None
    is_wrong_key = isinstance(error, ValueError) and text.startswith("Could not parse path")
    return isinstance(error, BaseError | NotImplementedError) or is_missing or is_wrong_key
