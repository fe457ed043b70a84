"""Prefect's server answers while its connections wait for SQLite's write lock."""

import subprocess
import sys
from pathlib import Path

from commands import PATIENCE

# A cursor that was not read to its end becomes garbage, its connection waits for the write lock
# that the main thread holds, and the main thread creates objects until a collection is due. Only if
# that does not block does it give the lock up before the other connection has given up waiting.
PROGRAM = """
import gc, sqlite3, sys, threading
from flows.serving.sqlite import collect_garbage_in_a_thread

file, patience, mended = sys.argv[1], float(sys.argv[2]), sys.argv[3] == "mended"
if mended:
    collect_garbage_in_a_thread()
holder, waiter = (
    sqlite3.connect(file, isolation_level=None, timeout=patience, check_same_thread=False)
    for _ in range(2)
)
holder.execute("PRAGMA journal_mode = WAL")
cursor = waiter.execute("SELECT 1 UNION SELECT 2")
cursor.fetchone()
garbage = [cursor]
garbage.append(garbage)
holder.execute("BEGIN IMMEDIATE")
has_begun = threading.Event()
# Called once the statement holds its connection, which it does not release until it ends.
waiter.set_trace_callback(lambda statement: has_begun.set())

def wait():
    try:
        waiter.execute("BEGIN IMMEDIATE")
        print("got the lock")
    except sqlite3.OperationalError as error:
        print(error)

waiting = threading.Thread(target=wait)
waiting.start()
has_begun.wait()
del cursor, garbage
kept = [[] for _ in range(200_000)]
holder.execute("COMMIT")
waiting.join()
"""


def outcome(file: Path, patience: float, how: str) -> str:
    """What became of the connection that waited up to `patience` seconds for the lock."""
    words = [sys.executable, "-c", PROGRAM, str(file), str(patience), how]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def test_the_collector_does_not_block_the_event_loop(tmp_path: Path) -> None:
    assert outcome(tmp_path / "plain.db", 1.0, "plain") == "database is locked\n"
    assert outcome(tmp_path / "mended.db", PATIENCE, "mended") == "got the lock\n"
