"""Prefect's server answers while its connections wait for SQLite's write lock."""

import subprocess
import sys
from pathlib import Path

# A cursor that was not read to its end becomes garbage, its connection waits for the write lock
# that the main thread holds, and the main thread creates objects until a collection is due.
PROGRAM = """
import gc, sqlite3, sys, threading, time
from flows.serving.sqlite import collect_garbage_in_a_thread

file, mended = sys.argv[1], sys.argv[2] == "mended"
if mended:
    collect_garbage_in_a_thread()
holder, waiter = (
    sqlite3.connect(file, isolation_level=None, timeout=4, check_same_thread=False)
    for _ in range(2)
)
holder.execute("PRAGMA journal_mode = WAL")
cursor = waiter.execute("SELECT 1 UNION SELECT 2")
cursor.fetchone()
garbage = [cursor]
garbage.append(garbage)
holder.execute("BEGIN IMMEDIATE")
waiting = threading.Thread(target=lambda: waiter.execute("BEGIN IMMEDIATE"), daemon=True)
waiting.start()
time.sleep(0.2)
del cursor, garbage
begun = time.monotonic()
kept = [[] for _ in range(200_000)]
print(time.monotonic() - begun)
holder.execute("COMMIT")
waiting.join()
"""


def seconds_blocked(file: str, how: str) -> float:
    """How long the main thread took to create objects."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, file, how], capture_output=True, text=True, check=False
    )
    return float(done.stdout)


def test_the_collector_does_not_block_the_event_loop(tmp_path: Path) -> None:
    assert seconds_blocked(str(tmp_path / "plain.db"), "plain") > 3.0
    assert seconds_blocked(str(tmp_path / "mended.db"), "mended") < 3.0
