"""The journal's file: what it keeps, and what it says of files that it cannot use."""

import os
import resource
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from mlxd.batching.plan import TokenLogprobs
from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler import messages as wire
from mlxd.scheduler.errors import ConfigError, JournalError
from mlxd.scheduler.events import RequestKey, Usage
from mlxd.scheduler.journal_file import Accept, Change, End, Entry, Forget, JournalFile, Start
from mlxd.scheduler.transcript import Record

MESSAGE = wire.Generate(id="a", prompt="hé", sampling=SamplingParams(seed=7), stream=False)
RECORD = Record(
    texts=("x", "", "y"),
    token_ids=(1, 2),
    logprobs=(TokenLogprobs(-0.5, ((1, -0.5),)), TokenLogprobs(-1.0, ())),
    terminal=wire.Done(id="a", finish_reason="stop", usage=Usage(1, 2)),
)


def key(number: int) -> RequestKey:
    return RequestKey("acme", str(number))


def accept(number: int) -> Accept:
    return Accept(key(number), b"digest", MESSAGE)


def journal(path: Path, **options: Any) -> JournalFile:
    return JournalFile(str(path), **({"fsync": False, "max_bytes": 2**20} | options))


def written(path: Path, *changes: Change) -> list[Entry]:
    file = journal(path)
    file.write(changes)
    file.close()
    return entries(path)


def entries(path: Path) -> list[Entry]:
    file = journal(path)
    try:
        return file.load()
    finally:
        file.close()


def test_open_and_ended_requests_come_back_as_they_were(tmp_path: Path) -> None:
    changes = [accept(1), accept(2), accept(3), accept(4), Start(key(1))]
    ends = [End(key(3), RECORD, 20.0), End(key(2), RECORD, 10.0), Forget(key(4))]
    found = written(tmp_path / "j", *changes, *ends)
    assert [entry.key for entry in found] == [key(2), key(3), key(1)]
    ended, _, still_open = found
    assert (ended.record, ended.message, ended.ended_at) == (RECORD, None, 10.0)
    assert (still_open.record, still_open.message, still_open.starts) == (None, MESSAGE, 2)
    assert {(entry.digest, entry.is_whole) for entry in found} == {(b"digest", True)}


def test_what_a_client_sent_is_for_its_owner_alone(tmp_path: Path) -> None:
    written(tmp_path / "j", accept(1))
    assert (tmp_path / "j").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("cut_bytes", [1, 100, 4000])
def test_a_write_that_was_cut_short_is_not_there_and_those_before_are(tmp_path: Path, cut_bytes: int) -> None:
    file = journal(tmp_path / "j", fsync=True)
    file.write([accept(1)])
    file.write([accept(2), accept(3)])
    for name in ("j", "j-wal"):
        shutil.copy(tmp_path / name, tmp_path / name.replace("j", "torn"))
    file.close()
    wal = tmp_path / "torn-wal"
    os.truncate(wal, wal.stat().st_size - cut_bytes)
    assert [entry.key for entry in entries(tmp_path / "torn")] == [key(1)]


def test_a_full_file_says_so_and_takes_more_once_something_is_forgotten(tmp_path: Path) -> None:
    file = journal(tmp_path / "j", max_bytes=2**16)
    taken = fill(file)
    assert 0 < taken == len(file.load())
    with pytest.raises(JournalError) as full:
        file.write([accept(taken)])
    assert full.value.reason == "journal_full"
    file.write([Forget(key(number)) for number in range(taken)])
    file.write([accept(1)])
    assert (tmp_path / "j").stat().st_size <= 2**16
    file.close()


def test_a_disk_that_takes_no_more_is_told_and_nothing_before_is_harmed(tmp_path: Path) -> None:
    file = journal(tmp_path / "j")
    file.write([accept(1)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "j-wal").stat().st_size, limits[1]))
    try:
        with pytest.raises(JournalError, match="I/O error") as failed:
            file.write([accept(2)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert failed.value.reason == "journal_failed"
    file.write([accept(3)])
    file.close()
    assert [entry.key for entry in entries(tmp_path / "j")] == [key(1), key(3)]


def fill(file: JournalFile) -> int:
    """Accept until it takes no more; how many it took."""
    for number in range(10_000):
        try:
            file.write([accept(number)])
        except JournalError:
            return number
    raise AssertionError("it never was full")


def corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:6000] = b"\xa5" * 1904
    path.write_bytes(data)


def execute(path: Path, statement: str) -> None:
    db = sqlite3.connect(path)
    db.execute(statement)
    db.commit()
    db.close()


BAD_FILES = {
    "noise": (lambda path: path.write_bytes(b"no database" * 100), "move it away"),
    "damaged": (corrupt, "move it away"),
    "other version": (lambda path: execute(path, "PRAGMA user_version=2"), "has version 2; .* version 1"),
    "other program": (
        lambda path: execute(path, "PRAGMA application_id=1"),
        "is a database of something else",
    ),
    "other entry": (lambda path: execute(path, "UPDATE requests SET message = x'c1'"), "cannot be read"),
    "other type": (lambda path: execute(path, "UPDATE requests SET message = 5"), "cannot be read"),
    "no message": (lambda path: execute(path, "UPDATE requests SET message = NULL"), "cannot be read"),
    "no text": (lambda path: execute(path, "UPDATE requests SET tenant = x'ff' || ''"), "move it away"),
    "other table": (lambda path: execute(path, "ALTER TABLE requests RENAME id TO number"), "move it away"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
}


@pytest.mark.parametrize("fault", BAD_FILES)
def test_a_file_that_cannot_be_used_is_one_line_that_says_why(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "j"
    written(path, *[accept(number) for number in range(50)])
    spoil, why = BAD_FILES[fault]
    spoil(path)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=rf"journal.path: {path}: .*{why}") as error:
        entries(path)
    assert "\n" not in str(error.value)


def test_a_file_in_use_and_a_missing_folder_are_told(tmp_path: Path) -> None:
    first = journal(tmp_path / "j")
    with pytest.raises(ConfigError, match="another process uses it"):
        journal(tmp_path / "j")
    first.write([accept(1)])
    first.close()
    with pytest.raises(ConfigError, match=r"the folder .*/none does not exist"):
        journal(tmp_path / "none" / "j")
