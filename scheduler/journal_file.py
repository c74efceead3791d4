"""Accepted requests and their ends in one SQLite file, so that neither is lost with the process."""

import os
import sqlite3
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from mlxd.batching.errors import SettingError
from mlxd.scheduler.errors import JournalError
from mlxd.scheduler.events import RequestKey
from mlxd.scheduler.journal_entries import (
    Accept,
    Begun,
    Change,
    End,
    Entry,
    Forget,
    Keep,
    Start,
    decode_entry,
    encode,
)
from mlxd.scheduler.journal_room import JournalRoom, JournalUsage

APPLICATION_ID = 0x6D6C7864
VERSION = 2
_MIGRATIONS = {1: f"UPDATE requests SET starts = {Begun.AGAIN:d} WHERE starts > {Begun.AGAIN:d}"}
"""What makes a file of that version one of the next. Version 1 counted processes: nobody was alone in one."""

_PAGE_BYTES = 4096
_ENTRY_BYTES = 2 * _PAGE_BYTES
"""What an entry takes at most besides its message or record: a leaf of the table, a part of the index."""
_FIXED_BYTES = 8 * _PAGE_BYTES
_OTHERS = stat.S_IRWXG | stat.S_IRWXO

_SCHEMA = """
CREATE TABLE requests (
    tenant TEXT NOT NULL, id TEXT NOT NULL, digest BLOB NOT NULL, is_whole INTEGER NOT NULL,
    message BLOB, starts INTEGER NOT NULL, ended_at REAL, record BLOB,
    PRIMARY KEY (tenant, id))
"""


def check_place(path: str) -> None:
    """Raises SettingError where a journal can neither be nor be made there; makes and changes nothing.

    It holds what clients sent and got: its folder, and the file if it is there, are its owner's alone.
    """
    file = Path(path)
    try:
        if not file.parent.is_dir():
            raise _problem(path, f"the folder {file.parent} does not exist")
        _check_mode(path, f"the folder {file.parent}", file.parent.stat().st_mode, 0o700)
        if not os.access(file.parent, os.R_OK | os.W_OK | os.X_OK):
            raise _problem(path, f"this user may not write in the folder {file.parent}")
        if file.exists():
            if not file.is_file():
                raise _problem(path, "it is no file")
            _check_mode(path, "the file", file.stat().st_mode, 0o600)
            if not os.access(file, os.R_OK | os.W_OK):
                raise _problem(path, "this user may not write it")
    except OSError as error:
        raise _problem(path, error.strerror or str(error)) from None


def _check_mode(path: str, what: str, mode: int, limit: int) -> None:
    mode = stat.S_IMODE(mode)
    if mode & _OTHERS:
        raise _problem(path, f"{what} has mode {mode:04o}, so others may use it; it must be {limit:04o}")


def _problem(path: str, sentence: str) -> SettingError:
    return SettingError(("journal", "path"), f"is {path!r}: {sentence}")


class JournalFile:
    """One process at a time has it open. Not thread-safe: one thread at a time may use it.

    A write that a crash cut short is not there afterwards: SQLite's write-ahead log has a checksum a frame.
    """

    def __init__(self, path: str, *, fsync: bool, max_bytes: int) -> None:
        """Makes the file, readable by its owner alone, where there is none.

        Args:
            fsync: wait in `write` until the disk has the changes; else a loss of power may undo the last
                ones. What is forgotten does not wait: it is forgotten again.
            max_bytes: `write` fails rather than let the file grow beyond.
        Raises:
            SettingError: it cannot be used, is in use, or is no journal of this version.
        """
        check_place(path)
        self._path = path
        self._fsync = fsync
        self._room = JournalRoom(max(0, max_bytes - _FIXED_BYTES))
        with self._opening():
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
            try:
                self._configure(fsync, max_bytes)
                self._check()
                self._measure()
            except BaseException:
                self._db.close()
                raise

    @contextmanager
    def _opening(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _problem(self._path, error.strerror or str(error)) from None
        except sqlite3.DatabaseError as error:
            if _code_of(error) == sqlite3.SQLITE_BUSY:
                raise _problem(self._path, "another process uses it") from None
            raise _problem(self._path, f"{error}; move it away to begin a new one") from None

    def _configure(self, fsync: bool, max_bytes: int) -> None:
        self._pragma("locking_mode", "EXCLUSIVE")
        self._pragma("page_size", _PAGE_BYTES)
        self._pragma("journal_mode", "WAL")
        if fsync and sys.platform == "darwin":
            self._pragma("fullfsync", 1)
        self._pragma("max_page_count", max(1, max_bytes // int(self._pragma("page_size"))))
        self._db.execute("BEGIN EXCLUSIVE")
        self._db.execute("COMMIT")

    def _pragma(self, name: str, value: str | int | None = None) -> str | int:
        row = self._db.execute(f"PRAGMA {name}" if value is None else f"PRAGMA {name}={value}").fetchone()
        return row[0] if row else ""

    def _check(self) -> None:
        if self._pragma("quick_check") != "ok":
            raise _problem(self._path, "is damaged; move it away to begin a new one")
        if not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            self._db.execute("BEGIN")
            self._db.execute(_SCHEMA)
            self._pragma("application_id", APPLICATION_ID)
            self._pragma("user_version", VERSION)
            self._db.execute("COMMIT")
        if self._pragma("application_id") != APPLICATION_ID:
            raise _problem(self._path, "is a database of something else")
        self._migrate()
        if (version := self._pragma("user_version")) != VERSION:
            raise _problem(self._path, f"has version {version}; this daemon knows version {VERSION}")

    def _migrate(self) -> None:
        while (change := _MIGRATIONS.get(version := int(self._pragma("user_version")))) is not None:
            self._db.execute("BEGIN")
            self._db.execute(change)
            self._pragma("user_version", version + 1)
            self._db.execute("COMMIT")

    def _measure(self) -> None:
        sizes = "coalesce(length(message), 0) + coalesce(length(record), 0)"
        for tenant, request_id, size in self._db.execute(f"SELECT tenant, id, {sizes} FROM requests"):
            self._room.set(RequestKey(tenant, request_id), _ENTRY_BYTES + size)

    def load(self) -> list[Entry]:
        """Everything, ended requests first in the order of their ends, then open ones as they were accepted.

        Raises:
            SettingError: something in it cannot be read.
        """
        with self._opening():
            rows = self._db.execute(
                "SELECT tenant, id, digest, is_whole, message, starts, ended_at, record FROM requests"
                " ORDER BY ended_at IS NULL, ended_at, rowid"
            )
            try:
                return [decode_entry(*row) for row in rows]
            except (msgspec.MsgspecError, TypeError, ValueError) as error:
                raise _problem(self._path, f"has an entry that cannot be read: {error}") from None

    @property
    def usage(self) -> JournalUsage:
        return self._room.usage

    def write(self, changes: Sequence[Change]) -> list[JournalError | None]:
        """All for which there is room; for each of them None, or why there is none.

        Raises:
            JournalError: nothing was written.
        """
        is_awaited = self._fsync and not all(isinstance(change, Forget | Keep) for change in changes)
        try:
            self._pragma("synchronous", "FULL" if is_awaited else "NORMAL")
            self._db.execute("BEGIN")
            errors = [self._try(change) for change in changes]
            self._db.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self._room.undo()
            is_full = _code_of(error) == sqlite3.SQLITE_FULL
            raise JournalError("journal_full" if is_full else "journal_failed", str(error)) from None
        self._room.settle()
        return errors

    def _try(self, change: Change) -> JournalError | None:
        try:
            self._apply(change)
        except JournalError as error:
            return error
        return None

    def _apply(self, change: Change) -> None:
        """Raises JournalError before anything is changed where there is no room."""
        match change:
            case Accept(key=key, digest=digest, message=message):
                blob = encode(message)
                self._room.put(key, _ENTRY_BYTES + len(blob))
                self._db.execute(
                    "INSERT OR REPLACE INTO requests VALUES (?, ?, ?, ?, ?, ?, NULL, NULL)",
                    (*key, digest, not message.stream, blob, Begun.ONCE),
                )
            case Start(key=key, begun=begun):
                if begun is Begun.ALONE:
                    again = "UPDATE requests SET starts = ? WHERE starts = ?"
                    self._db.execute(again, (Begun.AGAIN, Begun.ALONE))
                self._execute("UPDATE requests SET starts = ?", key, begun)
            case End(key=key, record=record, ended_at=ended_at) if self._room.size_of(key):
                blob = encode(record)
                self._room.put(key, _ENTRY_BYTES + len(blob))
                ended = "UPDATE requests SET message = NULL, ended_at = ?, record = ?"
                self._execute(ended, key, ended_at, blob)
            case Forget(key=key):
                self._execute("DELETE FROM requests", key)
                self._room.set(key, 0)
            case Keep(tenants=tenants):
                gone = self._room.keep(tenants)
                self._db.executemany("DELETE FROM requests WHERE tenant = ?", [(name,) for name in gone])

    def _execute(self, statement: str, key: RequestKey, *values: object) -> None:
        self._db.execute(f"{statement} WHERE tenant = ? AND id = ?", (*values, *key))

    def close(self) -> None:
        self._db.close()


def _code_of(error: sqlite3.DatabaseError) -> int:
    """SQLite's primary code; SQLITE_ERROR for an error of Python's module itself."""
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code & 0xFF
