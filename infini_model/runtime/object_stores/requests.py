"""Requests to an object store: the client, which failures are repeated, and how the rest is told.

`persist` repeats requests. obstore could do so by itself, but its retries leave out a listing that
is cut and many a reset connection, and hide whether a conditional put was sent twice. They serve
one purpose: the parts of a multipart upload.

What obstore says of a failure holds signed addresses and whole replies. Nothing of it is shown but
the HTTP status and the store's error code; the rest is told in the words of this module.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import re
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from infini_model.runtime.errors import (
    ObjectChangedError,
    ObjectMissingError,
    StoreError,
    UnreachableError,
    UserError,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

# The prefix of a store's settings and credentials in the environment.
VARIABLES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
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
FIRST_PAUSE = 0.1  # seconds
LONGEST_PAUSE = 5.0
MANY = 1000  # retries, which are limited by time
BUSY = (408, 429)  # besides 500 and above, but for 501: not implemented
STATUS = re.compile(r"status code: (\d{3})")
CODE = re.compile(r"<Code>(\w+)</Code>")
NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist")
# Instance metadata, which is asked for credentials when the environment has none.
METADATA = re.compile(r"169\.254\.\d|metadata\.google")
NOT_TRUSTED = re.compile(r"certificate|BadScheme|builder error")
# What a broken connection says, and how it is told.
BROKEN = (
    (re.compile(r"Connection ?refused"), "connection refused"),
    (re.compile(r"lookup address|dns error"), "its name cannot be resolved"),
    (re.compile(r"TimedOut|timed out|kind: Timeout"), "no answer in time"),
    (re.compile(r"unreachable"), "no route to it"),
    (re.compile(r"HTTP error|HttpError"), "the connection was cut"),
)
_used_by: int | None = None


def client(root: str, retry_seconds: float = 0.0) -> Any:
    """The obstore client of `root`, such as `s3://bucket`, as the environment now describes it.

    Threads share it, and its connections. It repeats failed requests by itself for `retry_seconds`.

    Raises `UserError` if obstore is not installed or the environment is wrong, `RuntimeError` in a
    forked process, where obstore would hang.
    """
    global _used_by
    if _used_by not in (None, os.getpid()):
        raise RuntimeError("object stores cannot be used after a fork: spawn the process instead")
    _used_by = os.getpid()
    scheme = root.partition("://")[0]
    prefix = VARIABLES[scheme]
    environment = {name: text for name, text in os.environ.items() if name.startswith(prefix)}
    if scheme == "s3":
        _check_endpoint(root, environment)
    return _make_client(root, retry_seconds, tuple(sorted(environment.items())))


def endpoint_of(root: str) -> str:
    """The server that the environment names for `root`; empty for the provider's own."""
    name = _endpoint_variable(os.environ) if root.startswith("s3://") else None
    return "" if name is None else os.environ[name]


def _endpoint_variable(environment: Mapping[str, str]) -> str | None:
    return next((name for name in ENDPOINTS if environment.get(name)), None)


def _check_endpoint(root: str, environment: dict[str, str]) -> None:
    """Say what is wrong before obstore does: it panics, or names no reason."""
    name = _endpoint_variable(environment)
    if name is None:
        return
    found = ENDPOINT.fullmatch(environment[name])
    if found is None:
        raise StoreError(f"{root}: {name} in the environment is not like https://host:port")
    if found[1] == "http" and environment.get("AWS_ALLOW_HTTP", "").lower() not in (
        "true",
        "1",
    ):
        raise StoreError(
            f"{root}: {name} in the environment is not encrypted; allow it by AWS_ALLOW_HTTP=true"
        )


@functools.lru_cache(maxsize=16)
def _make_client(root: str, retry_seconds: float, environment: tuple[tuple[str, str], ...]) -> Any:
    try:
        # All of it: while another thread imports it, its module `store` is there before the rest.
        import obstore
    except ImportError as error:
        raise UserError(f"{root}: needs obstore: pip install obstore") from error
    prefix = VARIABLES[root.partition("://")[0]]
    given = {name.removeprefix(prefix).lower(): text for name, text in environment}
    options: dict[str, Any] = {name: given[name] for name in CLIENT_OPTIONS if name in given}
    options |= {"connect_timeout": CONNECT_TIMEOUT, "read_timeout": SILENT_TIMEOUT}
    options |= {"timeout": REQUEST_TIMEOUT}
    retries = {
        "max_retries": MANY if retry_seconds else 0,
        "retry_timeout": timedelta(seconds=retry_seconds),
        "backoff": {"max_backoff": timedelta(seconds=LONGEST_PAUSE)},
    }
    return obstore.store.from_url(root, client_options=options, retry_config=retries)


def persist(address: str, patience: float, request: Callable[[], T]) -> T:
    """The result of `request`, repeated with growing pauses while its failures may pass.

    Gives up `patience` seconds after the first failure with an `UnreachableError`. Raises
    `StoreError` at once for what is final; both name `address`. What `request` raises of its own
    passes as it is.
    """
    deadline: float | None = None
    pause = FIRST_PAUSE
    while True:
        try:
            return request()
        except Exception as error:
            failure = told(error, address)
            if failure is error:
                raise
        # Raised out of the handler, so that obstore's error is in no traceback either.
        if not isinstance(failure, UnreachableError):
            raise failure
        if deadline is None:
            deadline = time.monotonic() + patience
            if patience:
                log.warning("%s; trying again for %g s", failure, patience)
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise failure
        time.sleep(min(remaining, pause * random.uniform(0.5, 1)))  # noqa: S311 -- a pause
        pause = min(2 * pause, LONGEST_PAUSE)


def told(error: Exception, address: str) -> Exception:
    """What a failure of obstore means, in one line that names `address`; others as they are."""
    text = str(error)
    # Our own errors come first: without obstore there are none of its own.
    if isinstance(error, UserError | UnreachableError) or not _is_from_obstore(error, text):
        return error
    found = STATUS.search(text)
    if found is not None:
        return _told_of_status(int(found[1]), text, address)
    if METADATA.search(text):
        variables = VARIABLES[address.partition("://")[0]]
        return StoreError(f"{address}: no credentials in the environment ({variables}…)")
    if NOT_TRUSTED.search(text):
        return StoreError(f"{address}: the connection would not be safe: check the certificate")
    for pattern, reason in BROKEN:
        if pattern.search(text):
            return UnreachableError(f"{address}: cannot be reached: {reason}")
    if "path segment" in text:
        return StoreError(f"{address}: a key with an empty or dotted folder name cannot be read")
    # Of the environment, mostly; without addresses, which may hold a password.
    reason = re.sub(r"\S*://\S*", "…", text.partition("\n")[0])
    return StoreError(f"{address}: {reason}")


def _is_from_obstore(error: Exception, text: str) -> bool:
    from obstore.exceptions import BaseError

    if isinstance(error, BaseError):
        return True
    # Some of its errors are Python's own types; those of the operating system have a number.
    if isinstance(error, FileNotFoundError):
        return error.errno is None
    return isinstance(error, NotImplementedError) or (
        isinstance(error, ValueError) and text.startswith("Could not parse path")
    )


def _told_of_status(status: int, text: str, address: str) -> Exception:
    code = CODE.search(text)
    answer = f"HTTP {status}, {code[1]}" if code else f"HTTP {status}"
    if status in BUSY or (status >= 500 and status != 501):
        return UnreachableError(f"{address}: cannot be reached: the store answers {answer}")
    if METADATA.search(text.partition("status code")[0]):
        return StoreError(f"{address}: no credentials in the environment ({answer})")
    if NO_BUCKET.search(text):
        return StoreError(f"{address}: there is no such bucket")
    if status == 404:
        return ObjectMissingError(f"{address}: not found")
    if status == 412:
        return ObjectChangedError(f"{address}: changed while it was read; run again")
    if status in (401, 403):
        return StoreError(f"{address}: access denied ({answer}); check the credentials")
    return StoreError(f"{address}: the store refuses the request ({answer})")
