"""Prefect's database: the check of a PostgreSQL, and what SQLite needs for many clients at once."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
from typing import TYPE_CHECKING

from infini_model.runtime.errors import UserError

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from prefect.server.database.configurations import AioSqliteConfiguration
    from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction


DRIVER = "postgresql+asyncpg"
CONNECT_SECONDS = 10.0


async def _connect(address: str) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(address)
    async with asyncio.timeout(CONNECT_SECONDS), engine.connect():
        pass
    await engine.dispose()


def check_database(address: str) -> None:
    """Raise `UserError` naming `--database` if the server could not store its records there.

    The message never quotes the address, which may contain a password.
    """
    from asyncpg import InterfaceError, PostgresError  # type: ignore[import-untyped]
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError, SQLAlchemyError

    expected = UserError(f"--database: expected {DRIVER}://USER:PASSWORD@HOST:PORT/NAME")
    try:
        url = make_url(address)
    except (ArgumentError, ValueError):
        raise expected from None
    if url.drivername != DRIVER:
        raise expected
    try:
        asyncio.run(_connect(address))
    except TimeoutError as error:
        raise UserError(f"--database: {url.host} does not answer") from error
    except (
        OSError,
        TypeError,
        ValueError,
        SQLAlchemyError,
        InterfaceError,
        PostgresError,
    ) as error:
        raise UserError(f"--database: {str(error).splitlines()[0]}") from error


YOUNG_SECONDS = 1.0
# The oldest generation holds every module of the server: a collection of it takes a second.
YOUNG_PER_FULL = 60


def take_write_locks_at_once() -> None:
    """Make every transaction of Prefect's server that may write take SQLite's write lock at once.

    Prefect begins most of them as readers. If another transaction writes before such a reader does,
    SQLite fails it immediately, regardless of the timeout: the API answers 503, which Prefect's
    client retries but its UI does not ("Unknown error" after *Submit*).
    """
    from prefect.server.database.configurations import AioSqliteConfiguration

    begin = AioSqliteConfiguration.begin_transaction

    def begin_immediate(
        self: AioSqliteConfiguration,
        session: AsyncSession,
        with_for_update: bool = False,  # noqa: ARG001 - the signature is Prefect's
    ) -> AbstractAsyncContextManager[AsyncSessionTransaction]:
        return begin(self, session, with_for_update=True)

    AioSqliteConfiguration.begin_transaction = begin_immediate  # type: ignore[assignment, method-assign]


def collect_garbage_in_a_thread() -> None:
    """Keep the garbage collector out of the thread that runs the server's event loop.

    Collecting an SQLite cursor that was not read to its end waits for its connection, which may be
    waiting for the write lock in a thread of its own. If the event loop's thread collects it while
    one of its tasks holds that lock, all of them wait for the 60 seconds that Prefect grants, and
    the server answers nothing. Any other thread can wait.
    """
    gc.disable()
    threading.Thread(target=_collect, name="garbage collector", daemon=True).start()


def _collect() -> None:
    for turn in itertools.count(1):
        time.sleep(YOUNG_SECONDS)
        gc.collect(2 if turn % YOUNG_PER_FULL == 0 else 1)
