"""What runs leave in Prefect's database: rows and bytes of its SQLite file.

`infini serve` is up. `infini preprocess` runs on a dataset that stands, as on a night without new
text, and `infini run` trains a tiny model for a few steps; then lines of a log are sent as the
worker sends them; the runs themselves log warnings only. Each row is what one of them added. The
bytes are those of the file, into which its write-ahead log is emptied before each look, so they
contain indexes and half-filled pages.
"""

from __future__ import annotations

import argparse
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.orchestration import infini, post, run, serving, settings
from benchmarks.report import Cell, Ratio, publish, spread
from infini_model.config import dump_config

TABLES = ("log", "events", "event_resources", "flow_run_state", "task_run_state", "artifact")
LINES_AT_ONCE = 100
LINE = "GPU0:INFO | 2026-01-01 00:00:00 | Step [100/10000] | Loss: 2.2340 | LR: 1.00e-05"


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prefect_records",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=5, help="of each flow")
    parser.add_argument("--lines", type=int, default=5000, help="of a log")
    return parser.parse_args()


class Database:
    """The rows of the tables that grow, and the bytes of the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def counts(self) -> Counter[str]:
        """Rows by table, and `bytes`."""
        with closing(sqlite3.connect(self._path, timeout=60.0)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            rows = {
                table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]  # noqa: S608 -- names above
                for table in TABLES
            }
        return Counter(rows | {"bytes": self._path.stat().st_size})


def send_lines(url: str, count: int) -> None:
    """Send lines of a log to Prefect's API."""
    flow_run = post(url, "flow_runs/filter")[0]["id"]
    line = {
        "name": "prefect.flow_runs",
        "level": 20,
        "message": LINE,
        "timestamp": datetime.now(UTC).isoformat(),
        "flow_run_id": flow_run,
    }
    for start in range(0, count, LINES_AT_ONCE):
        send(url, [line] * min(LINES_AT_ONCE, count - start))


def send(url: str, lines: list[dict[str, object]]) -> None:
    """Send some lines in one request."""
    import httpx

    httpx.post(f"{url}/logs/", json=lines, timeout=60.0).raise_for_status()


def main() -> None:
    """Measure and publish."""
    options = parse()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = settings(folder)
        file = folder / "config.yaml"
        file.write_text(dump_config(config), encoding="utf-8")
        with serving(config) as url:
            (path,) = folder.rglob("prefect.db")
            database = Database(path)
            run(*infini("preprocess", "--config", file))
            work: dict[str, tuple[int, Callable[[], object]]] = {
                "infini preprocess": (
                    options.runs,
                    lambda: run(*infini("preprocess", "--config", file)),
                ),
                "infini run": (options.runs, lambda: run(*infini("run", "--config", file))),
                "a line of a log": (1, lambda: send_lines(url, options.lines)),
            }
            rows: list[dict[str, Cell]] = []
            for what, (times, do) in work.items():
                before = database.counts()
                for _ in range(times):
                    do()
                after = database.counts()
                each = times if what != "a line of a log" else options.lines
                counted = {table: (after[table] - before[table]) / each for table in TABLES}
                size = (after["bytes"] - before["bytes"]) / each
                rows.append({"": what, **counted, "bytes": size})
    ratios: dict[str, Ratio] = {
        f"bytes of {row['']}": spread([max(1.0, float(str(row["bytes"])))]) for row in rows
    }
    publish("prefect_records", "Rows and bytes in Prefect's database", rows, ratios)


if __name__ == "__main__":
    main()
