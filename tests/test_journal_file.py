"""The journal's file: what it keeps, and what it says of files that it cannot use."""

import os
import random
import re
import resource
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlxd.batching.errors import SettingError
from mlxd.batching.plan import TokenLogprobs
from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler import messages as wire
from mlxd.scheduler.errors import JournalError
from mlxd.scheduler.events import RequestKey, Usage
from mlxd.scheduler.journal_entries import Accept, Begun, Change, End, Entry, Forget, Keep, Start, encode
from mlxd.scheduler.journal_file import JournalFile, check_place
from mlxd.scheduler.transcript import Record

MESSAGE = wire.Generate(id="a", prompt="hé", sampling=SamplingParams(seed=7), stream=False)
RECORD = Record(
    texts=("x", "", "y"),
    token_ids=(1, 2),
    logprobs=(TokenLogprobs(-0.5, ((1, -0.5),)), TokenLogprobs(-1.0, ())),
    terminal=wire.Done(id="a", finish_reason="stop", usage=Usage(1, 2)),
)


def key(number: int, tenant: str = "acme") -> RequestKey:
    return RequestKey(tenant, str(number))


def accept(number: int, tenant: str = "acme", num_bytes: int = 2) -> Accept:
    message = msgspec.structs.replace(MESSAGE, prompt="h" * num_bytes)
    return Accept(key(number, tenant), b"digest", message)


def journal(path: Path, **options: Any) -> JournalFile:
    return JournalFile(str(path), **({"fsync": False, "max_bytes": 2**20} | options))


def written(path: Path, *changes: Change) -> list[Entry]:
    file = journal(path)
    assert not any(file.write(changes))
    file.close()
    return entries(path)


def entries(path: Path) -> list[Entry]:
    file = journal(path)
    try:
        return file.load()
    finally:
        file.close()


def test_open_and_ended_requests_come_back_as_they_were(tmp_path: Path) -> None:
    changes = [accept(1), accept(2), accept(3), accept(4), Start(key(1), Begun.AGAIN)]
    ends = [End(key(3), RECORD, 20.0), End(key(2), RECORD, 10.0), Forget(key(4))]
    found = written(tmp_path / "j", *changes, *ends)
    assert [entry.key for entry in found] == [key(2), key(3), key(1)]
    ended, _, still_open = found
    assert (ended.record, ended.message, ended.ended_at) == (RECORD, None, 10.0)
    message = accept(1).message
    assert (still_open.record, still_open.message, still_open.begun) == (None, message, Begun.AGAIN)
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


def test_one_request_at_most_was_begun_alone_last(tmp_path: Path) -> None:
    starts = [Start(key(1), Begun.ALONE), Start(key(2), Begun.AGAIN), Start(key(3), Begun.ALONE)]
    found = written(tmp_path / "j", *[accept(number) for number in range(4)], *starts)
    assert [entry.begun for entry in found] == [Begun.ONCE, Begun.AGAIN, Begun.AGAIN, Begun.ALONE]


def test_a_file_of_the_first_version_blames_nobody(tmp_path: Path) -> None:
    """It counted processes: a third one had others beside it."""
    path = tmp_path / "j"
    written(path, accept(1), accept(2), accept(3))
    execute(path, "UPDATE requests SET starts = 1 + id")
    execute(path, "PRAGMA user_version=1")
    found = entries(path)
    assert [entry.begun for entry in found] == [Begun.AGAIN, Begun.AGAIN, Begun.AGAIN]
    assert entries(path) == found


def test_what_a_tenant_that_is_gone_has_is_dropped_and_its_name_begins_empty(tmp_path: Path) -> None:
    both, one = frozenset({"acme", "beta"}), frozenset({"acme"})
    end = End(key(1, "beta"), RECORD, 10.0)
    changes = [Keep(both), accept(1), accept(1, "beta"), accept(2, "beta"), end, Keep(one), Keep(both)]
    again = [accept(2, "beta"), End(key(2, "beta"), RECORD, 20.0), End(key(1, "beta"), RECORD, 30.0)]
    found = written(tmp_path / "j", *changes, *again)
    assert [(entry.key, entry.ended_at) for entry in found] == [(key(2, "beta"), 20.0), (key(1), 0.0)]


def test_a_full_file_says_so_and_takes_more_once_something_is_forgotten(tmp_path: Path) -> None:
    file = journal(tmp_path / "j", max_bytes=2**17)
    taken = fill(file)
    assert 0 < taken == len(file.load())
    (full,) = file.write([accept(taken)])
    assert full is not None
    assert full.reason == "journal_full"
    file.write([Forget(key(number)) for number in range(taken)])
    assert file.write([accept(1)]) == [None]
    assert (tmp_path / "j").stat().st_size <= 2**17
    file.close()


def test_what_finds_no_room_does_not_keep_out_what_comes_with_it(tmp_path: Path) -> None:
    file = journal(tmp_path / "j", max_bytes=2**18)
    errors = file.write([accept(1), accept(2, num_bytes=2**18), accept(3), End(key(1), RECORD, 1.0)])
    assert [error and error.reason for error in errors] == [None, "journal_full", None, None]
    assert [entry.key for entry in file.load()] == [key(1), key(3)]
    file.close()


def test_an_end_that_finds_no_room_leaves_its_request_open(tmp_path: Path) -> None:
    file = journal(tmp_path / "j", max_bytes=2**17)
    file.write([accept(1)])
    large = msgspec.structs.replace(RECORD, texts=("x" * 2**17, "", ""))
    (error,) = file.write([End(key(1), large, 1.0)])
    assert error is not None
    assert error.reason == "journal_full"
    (entry,) = file.load()
    assert (entry.record, entry.message) == (None, accept(1).message)
    file.close()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_there_is_room_for_fits_the_file(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    file = journal(tmp_path / "j", max_bytes=2**20)
    file.write([Keep(frozenset({"a", "b", "c"}))])
    held: set[RequestKey] = set()
    refused = 0
    for number in range(600):
        tenant, num_bytes = dice.choice("aabc"), dice.choice((10, 1500, 2100, 4050, 4200, 9000, 30_000))
        change: Change = accept(number, tenant, num_bytes)
        if held and dice.random() < 0.35:
            change = Forget(dice.choice(sorted(held)))
            held.discard(change.key)
        (error,) = file.write([change])
        if error is None and isinstance(change, Accept):
            held.add(change.key)
        refused += error is not None
        assert error is None or "its part is" in str(error)
    assert refused > 20
    assert {entry.key for entry in file.load()} == held
    file.close()


@pytest.mark.parametrize("is_opened_again", [False, True])
def test_a_tenant_has_its_part_whatever_others_hold(tmp_path: Path, is_opened_again: bool) -> None:
    tenants = Keep(frozenset({"quiet", "flood"}))
    file = journal(tmp_path / "j", max_bytes=2**20)
    file.write([tenants])
    fill(file, "flood", 3_000)
    if is_opened_again:
        file.close()
        file = journal(tmp_path / "j", max_bytes=2**20)
        file.write([tenants])
    assert file.write([accept(1_000, "flood", 3_000)]) != [None]
    part = (2**20 - 8 * 4096) // 4
    assert fill(file, "quiet", 3_000) >= part // (2 * 4096 + 3_100) > 20
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


def fill(file: JournalFile, tenant: str = "acme", num_bytes: int = 2) -> int:
    """Accept until it takes no more; how many it took."""
    for number in range(10_000):
        if file.write([accept(number, tenant, num_bytes)]) != [None]:
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


FEWER_TEXTS = msgspec.structs.replace(RECORD, texts=("x",))
BAD_FILES = {
    "noise": (lambda path: path.write_bytes(b"no database" * 100), "move it away"),
    "damaged": (corrupt, "move it away"),
    "other version": (lambda path: execute(path, "PRAGMA user_version=3"), "has version 3; .* version 2"),
    "other program": (
        lambda path: execute(path, "PRAGMA application_id=1"),
        "is a database of something else",
    ),
    "other entry": (lambda path: execute(path, "UPDATE requests SET message = x'c1'"), "cannot be read"),
    "other type": (lambda path: execute(path, "UPDATE requests SET message = 5"), "cannot be read"),
    "fewer texts": (
        lambda path: execute(path, f"UPDATE requests SET record = x'{encode(FEWER_TEXTS).hex()}'"),
        "cannot be read",
    ),
    "no message": (lambda path: execute(path, "UPDATE requests SET message = NULL"), "cannot be read"),
    "no text": (lambda path: execute(path, "UPDATE requests SET tenant = x'ff' || ''"), "move it away"),
    "other table": (lambda path: execute(path, "ALTER TABLE requests RENAME id TO number"), "move it away"),
    "other start": (lambda path: execute(path, "UPDATE requests SET starts = 4"), "cannot be read"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "it is no file"),
    "readable": (
        lambda path: path.chmod(0o640),
        "the file has mode 0640, so others may use it; it must be 0600",
    ),
}


@pytest.mark.parametrize("fault", BAD_FILES)
def test_a_file_that_cannot_be_used_is_one_line_that_says_why(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "j"
    written(path, *[accept(number) for number in range(50)])
    spoil, why = BAD_FILES[fault]
    spoil(path)  # type: ignore[operator]
    with pytest.raises(SettingError, match=rf"journal.path is '{path}': .*{why}") as error:
        entries(path)
    assert "\n" not in str(error.value)


def test_a_file_in_use_is_told(tmp_path: Path) -> None:
    first = journal(tmp_path / "j")
    with pytest.raises(SettingError, match="another process uses it"):
        journal(tmp_path / "j")
    first.write([accept(1)])
    first.close()


@pytest.mark.parametrize(
    ("place", "mode", "why"),
    [
        ("none/j", None, "the folder {tmp}/none does not exist"),
        ("file/j", None, "the folder {tmp}/file does not exist"),
        ("folder", 0o700, "it is no file"),
        ("folder/j", 0o755, "the folder {tmp}/folder has mode 0755, so others may use it; it must be 0700"),
        ("folder/j", 0o720, "the folder {tmp}/folder has mode 0720, so others may use it; it must be 0700"),
        ("folder/j", 0o701, "the folder {tmp}/folder has mode 0701, so others may use it; it must be 0700"),
        ("folder/j", 0o700, None),
    ],
)
def test_a_place_where_no_journal_can_be_is_one_line_that_says_why(
    tmp_path: Path, place: str, mode: int | None, why: str | None
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "folder"
    folder.mkdir()
    if mode is not None:
        folder.chmod(mode)
    path = str(tmp_path / place)
    if why is None:
        check_place(path)
        assert list(folder.iterdir()) == []
        journal(Path(path)).close()
        return
    for refuse in (check_place, lambda path: journal(Path(path))):
        with pytest.raises(SettingError) as error:
            refuse(path)
        assert str(error.value) == f"journal.path is {path!r}: {why.format(tmp=tmp_path)}"


@pytest.mark.parametrize(
    ("locked", "why"),
    [("folder", "this user may not write in the folder {tmp}"), ("j", "this user may not write it")],
)
def test_a_place_that_may_not_be_written_is_refused(
    tmp_path: Path, locked: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "j"
    written(file, accept(1))
    closed = tmp_path if locked == "folder" else file
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != closed)
    with pytest.raises(SettingError, match=re.escape(why.format(tmp=tmp_path))):
        check_place(str(file))
