"""SQLite transactions that take the write lock at once. A transaction that begins with a read fails if another process writes
meanwhile."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Commit everything that is written in the block, or nothing of it."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite itself ends it on a full disk
            connection.execute("ROLLBACK")
        raise
