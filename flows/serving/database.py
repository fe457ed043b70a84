"""Prefect's database: the check of a PostgreSQL, and what SQLite and several servers need."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infini_model.runtime.errors import UserError
from infini_model.runtime.storage import lock

if TYPE_CHECKING:
    from prefect.server.database.configurations import AioSqliteConfiguration
    from sqlalchemy.ext.asyncio import AsyncSession

DRIVER = "postgresql+asyncpg"
CONNECT_SECONDS = 10.0


def check_database(address: str) -> None:
    """Raise `UserError` naming `--database` if the server could not store its records there.

    The message never quotes the address, which may contain a password.
    """
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError
    from sqlalchemy.ext.asyncio import create_async_engine
    from sqlalchemy.pool import NullPool

    async def connect() -> None:
        engine = create_async_engine(url, poolclass=NullPool)
        async with asyncio.timeout(CONNECT_SECONDS), engine.connect():
            pass

    expected = UserError(f"--database: expected {DRIVER}://USER:PASSWORD@HOST:PORT/NAME")
    try:
        url = make_url(address)
    except (ArgumentError, ValueError):
        raise expected from None
    if url.drivername != DRIVER:
        raise expected
    try:
        asyncio.run(connect())
    except TimeoutError as error:
        raise UserError(f"--database: {url.host} does not answer") from error
    except Exception as error:  # asyncpg, SQLAlchemy and the network raise their own
        reason, _, _ = str(error).partition("\n")
        raise UserError(f"--database: {reason}") from error


def take_write_locks_at_once() -> None:
    """Make every transaction of Prefect's server that may write take SQLite's write lock at once.

    Prefect 3.9.1 begins most of them as readers. If another transaction writes before such a reader
    does, SQLite fails it immediately, regardless of the timeout: the API answers 503, which
    Prefect's client retries but its UI does not ("Unknown error" after *Submit*).
    """
    from prefect.server.database.configurations import AioSqliteConfiguration

    begin = AioSqliteConfiguration.begin_transaction

    def begin_immediate(self: AioSqliteConfiguration, session: AsyncSession, **_: bool) -> Any:
        return begin(self, session, with_for_update=True)

    AioSqliteConfiguration.begin_transaction = begin_immediate  # type: ignore[assignment, method-assign]


def migrate_one_at_a_time(lock_file: Path) -> None:
    """Let servers that start together, of a command and of `infini serve`, migrate one by one.

    Both would apply the same migration, and one of them would exit.
    """
    from prefect.server.database.interface import PrefectDBInterface

    create = PrefectDBInterface.create_db

    async def create_alone(self: PrefectDBInterface) -> None:
        with lock(lock_file):
            await create(self)

    PrefectDBInterface.create_db = create_alone  # type: ignore[method-assign]
