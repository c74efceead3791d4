"""Accepted requests and their ends in one SQLite file, so that neither is lost with the process."""

import os
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mlxd.scheduler.errors import ConfigError, JournalError
from mlxd.scheduler.events import RequestKey
from mlxd.scheduler.messages import Generate
from mlxd.scheduler.transcript import Record

APPLICATION_ID = 0x6D6C7864
VERSION = 1

_SCHEMA = """
CREATE TABLE requests (
    tenant TEXT NOT NULL, id TEXT NOT NULL, digest BLOB NOT NULL, is_whole INTEGER NOT NULL,
    message BLOB, starts INTEGER NOT NULL, ended_at REAL, record BLOB,
    PRIMARY KEY (tenant, id))
"""


@dataclass(frozen=True, slots=True)
class Accept:
    """`message`: with a seed, so that it gives the same tokens again."""

    key: RequestKey
    digest: bytes
    message: Generate


@dataclass(frozen=True, slots=True)
class Start:
    """An accepted request begins anew."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class End:
    """`ended_at`: Unix time, seconds."""

    key: RequestKey
    record: Record
    ended_at: float


@dataclass(frozen=True, slots=True)
class Forget:
    key: RequestKey


Change = Accept | Start | End | Forget


@dataclass(frozen=True, slots=True)
class Entry:
    """What the journal has of one request: its message while it is open, its record afterwards.

    `starts`: how often it was begun.
    """

    key: RequestKey
    digest: bytes
    is_whole: bool
    message: Generate | None
    starts: int
    ended_at: float
    record: Record | None


class JournalFile:
    """One process at a time has it open. Not thread-safe: one thread at a time may use it.

    A write that a crash cut short is not there afterwards: SQLite's write-ahead log has a checksum a frame.
    """

    def __init__(self, path: str, *, fsync: bool, max_bytes: int) -> None:
        """Makes the file, readable by its owner alone, where there is none.

        Args:
            fsync: wait in `write` until the disk has what was accepted; else a loss of power may undo the
                last writes. Other changes do not wait: without them a request runs again, and ends as it did.
            max_bytes: `write` fails rather than let the file grow beyond.
        Raises:
            ConfigError: it cannot be used, is in use, or is no journal of this version.
        """
        self._path = path
        self._fsync = fsync
        folder = Path(path).parent
        if not folder.is_dir():
            raise self._problem(f"the folder {folder} does not exist")
        with self._opening():
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
            try:
                self._configure(fsync, max_bytes)
                self._check()
            except BaseException:
                self._db.close()
                raise

    def _problem(self, sentence: str) -> ConfigError:
        return ConfigError(f"journal.path: {self._path}: {sentence}")

    @contextmanager
    def _opening(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._problem(error.strerror or str(error)) from None
        except sqlite3.DatabaseError as error:
            if _code_of(error) == sqlite3.SQLITE_BUSY:
                raise self._problem("another process uses it") from None
            raise self._problem(f"{error}; move it away to begin a new one") from None

    def _configure(self, fsync: bool, max_bytes: int) -> None:
        self._pragma("locking_mode", "EXCLUSIVE")
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
            raise self._problem("is damaged; move it away to begin a new one")
        if not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            self._db.execute("BEGIN")
            self._db.execute(_SCHEMA)
            self._pragma("application_id", APPLICATION_ID)
            self._pragma("user_version", VERSION)
            self._db.execute("COMMIT")
        if self._pragma("application_id") != APPLICATION_ID:
            raise self._problem("is a database of something else")
        if (version := self._pragma("user_version")) != VERSION:
            raise self._problem(f"has version {version}; this daemon knows version {VERSION}")

    def load(self) -> list[Entry]:
        """Everything, ended requests first in the order of their ends, then open ones as they were accepted.

        Raises:
            ConfigError: something in it cannot be read.
        """
        with self._opening():
            rows = self._db.execute(
                "SELECT tenant, id, digest, is_whole, message, starts, ended_at, record FROM requests"
                " ORDER BY ended_at IS NULL, ended_at, rowid"
            )
            try:
                return [_entry(*row) for row in rows]
            except (msgspec.MsgspecError, TypeError, ValueError) as error:
                raise self._problem(f"has an entry that cannot be read: {error}") from None

    @property
    def used_bytes(self) -> int:
        """Of its `max_bytes`; room of entries that are gone is used again. 0 where the disk fails."""
        try:
            pages, free = (int(self._pragma(name)) for name in ("page_count", "freelist_count"))
        except sqlite3.DatabaseError:
            return 0
        return (pages - free) * int(self._pragma("page_size"))

    def write(self, changes: Sequence[Change]) -> None:
        """All of them or none. Raises JournalError."""
        is_awaited = self._fsync and any(isinstance(change, Accept) for change in changes)
        try:
            self._pragma("synchronous", "FULL" if is_awaited else "NORMAL")
            self._db.execute("BEGIN")
            for change in changes:
                self._apply(change)
            self._db.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            is_full = _code_of(error) == sqlite3.SQLITE_FULL
            raise JournalError("journal_full" if is_full else "journal_failed", str(error)) from None

    def _apply(self, change: Change) -> None:
        tenant, request_id = change.key
        match change:
            case Accept(digest=digest, message=message):
                self._db.execute(
                    "INSERT OR REPLACE INTO requests VALUES (?, ?, ?, ?, ?, 1, NULL, NULL)",
                    (tenant, request_id, digest, not message.stream, _encode(message)),
                )
            case Start():
                self._execute("UPDATE requests SET starts = starts + 1", change.key)
            case End(record=record, ended_at=ended_at):
                ended = "UPDATE requests SET message = NULL, ended_at = ?, record = ?"
                self._execute(ended, change.key, ended_at, _encode(record))
            case Forget():
                self._execute("DELETE FROM requests", change.key)

    def _execute(self, statement: str, key: RequestKey, *values: object) -> None:
        self._db.execute(f"{statement} WHERE tenant = ? AND id = ?", (*values, *key))

    def close(self) -> None:
        self._db.close()


def _code_of(error: sqlite3.DatabaseError) -> int:
    """SQLite's primary code; SQLITE_ERROR for an error of Python's module itself."""
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code & 0xFF


_encode: Callable[[Generate | Record], bytes] = msgspec.msgpack.Encoder().encode
_decode_message = msgspec.msgpack.Decoder(Generate).decode
_decode_record = msgspec.msgpack.Decoder(Record).decode


def _entry(
    tenant: str,
    request_id: str,
    digest: bytes,
    is_whole: int,
    message: bytes | None,
    starts: int,
    ended_at: float | None,
    record: bytes | None,
) -> Entry:
    if message is None and record is None:
        raise ValueError("it has neither a message nor a record")
    return Entry(
        key=RequestKey(tenant, request_id),
        digest=digest,
        is_whole=bool(is_whole),
        message=None if message is None else _decode_message(message),
        starts=starts,
        ended_at=ended_at or 0.0,
        record=None if record is None else _decode_record(record),
    )
