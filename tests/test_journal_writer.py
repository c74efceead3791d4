"""The journal's thread: who is told when, and what one fault does to the others."""

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_journal_file import MESSAGE, RECORD, entries, key

from mlxd.metrics.recorder import NullRecorder
from mlxd.scheduler.errors import JournalError
from mlxd.scheduler.journal import JournalWriter
from mlxd.scheduler.journal_entries import Accept, Begun, Change, End, Keep
from mlxd.scheduler.journal_file import JournalFile
from mlxd.scheduler.transcript import Transcript


class GatedFile(JournalFile):
    """Writes only when let; refuses what `refuses` says."""

    def __init__(self, path: Path, refuses: Callable[[Change], bool] = lambda change: False) -> None:
        super().__init__(str(path), fsync=False, max_bytes=2**20)
        self.gate = threading.Event()
        self.writes: list[list[Change]] = []
        self._refuses = refuses

    def write(self, changes: Sequence[Change]) -> list[JournalError | None]:
        self.gate.wait(5.0)
        if any(map(self._refuses, changes)):
            raise JournalError("journal_full", "as asked")
        self.writes.append([change for change in changes if not isinstance(change, Keep)])
        return super().write(changes)


class Told:
    """Takes the calls that would run on the loop."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.errors: dict[object, JournalError | None] = {}

    def on_loop(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def then(self, name: object) -> Callable[[JournalError | None], None]:
        def then(error: JournalError | None) -> None:
            self.errors[name] = error

        return then

    def accept(self, journal: JournalWriter, number: int) -> None:
        journal.accept(key(number), b"digest", MESSAGE, self.then(number))

    def wait(self, count: int) -> None:
        for _ in range(count):
            self._calls.get(timeout=5.0)()


def writer(file: JournalFile, told: Told, **options: Any) -> JournalWriter:
    return JournalWriter(file, ["acme"], told.on_loop, NullRecorder(), **options)


def test_what_waits_for_a_write_shares_the_next_one(tmp_path: Path) -> None:
    file, told = GatedFile(tmp_path / "j"), Told()
    journal = writer(file, told)
    for number in range(10):
        told.accept(journal, number)
    assert told.errors == {}
    file.gate.set()
    told.wait(10)
    assert told.errors == dict.fromkeys(range(10))
    assert len(file.writes) <= 2
    assert sum(map(len, file.writes)) == 10
    assert journal.close()
    assert len(entries(tmp_path / "j")) == 10


def test_what_cannot_be_written_takes_nothing_else_with_it(tmp_path: Path) -> None:
    def refuses(change: Change) -> bool:
        return isinstance(change, Accept) and change.key == key(3)

    file, told = GatedFile(tmp_path / "j", refuses), Told()
    journal = writer(file, told, wall_clock=lambda: 7.0)
    for number in range(6):
        told.accept(journal, number)
    transcript = Transcript.restored("1", RECORD)
    journal.end(key(1), transcript, told.then("end"))
    journal.forget(key(2))
    file.gate.set()
    told.wait(7)
    assert journal.close()
    assert [name for name, error in told.errors.items() if error] == [3]
    found = {entry.key: entry for entry in entries(tmp_path / "j")}
    assert set(found) == {key(0), key(1), key(4), key(5)}
    assert (found[key(1)].record, found[key(1)].ended_at) == (RECORD, 7.0)


def test_a_write_that_hangs_shows(tmp_path: Path) -> None:
    file, told = GatedFile(tmp_path / "j"), Told()
    file.gate.set()
    journal = writer(file, told)
    told.accept(journal, 0)
    told.wait(1)
    while journal.busy_s:
        pass
    file.gate.clear()
    told.accept(journal, 1)
    while not journal.busy_s:
        pass
    first = journal.busy_s
    threading.Event().wait(0.02)
    assert journal.busy_s > first
    file.gate.set()
    told.wait(1)
    assert journal.close()
    assert journal.busy_s == 0.0
    assert not journal.is_alive


def test_ends_and_beginnings_are_told_once_the_file_has_them_and_failures_are_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, told = GatedFile(tmp_path / "j", lambda change: isinstance(change, End)), Told()
    journal = writer(file, told)
    told.accept(journal, 1)
    journal.start(key(1), Begun.AGAIN, told.then("start"))
    journal.end(key(1), Transcript.restored("1", RECORD), told.then("end"))
    journal.end(key(1), Transcript.restored("1", RECORD), told.then("again"))
    assert (journal.num_untold, told.errors) == (4, {})
    file.gate.set()
    told.wait(4)
    assert (journal.num_untold, list(told.errors)) == (0, [1, "start", "end", "again"])
    reasons = [error and error.reason for error in told.errors.values()]
    assert reasons == [None, None, "journal_full", "journal_full"]
    assert [record.getMessage() for record in caplog.records] == [
        "journal: a change was not written (End): as asked"
    ]
    assert journal.close()


def test_what_tenants_that_are_no_more_have_is_neither_told_nor_kept(tmp_path: Path) -> None:
    file, told = GatedFile(tmp_path / "j"), Told()
    file.gate.set()
    file.write([Accept(key(1), b"", MESSAGE), Accept(key(1, "gone"), b"", MESSAGE)])
    journal = writer(file, told)
    assert [entry.key for entry in journal.take_entries()] == [key(1)]
    assert journal.close()
    assert [entry.key for entry in entries(tmp_path / "j")] == [key(1)]


@pytest.mark.parametrize(("now", "age_s"), [(100.0, 100.0), (7.0, 7.0), (-5.0, 0.0)])
def test_the_age_of_an_entry_is_never_negative(tmp_path: Path, now: float, age_s: float) -> None:
    file, told = GatedFile(tmp_path / "j"), Told()
    file.gate.set()
    file.write([Accept(key(1), b"", MESSAGE)])
    journal = writer(file, told, wall_clock=lambda: now)
    (entry,) = journal.take_entries()
    assert journal.age_s(entry) == age_s
    assert journal.take_entries() == []
    assert journal.close()
