"""A request that ends the process is found, and no other one is blamed for it."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from mlxd.scheduler.errors import JournalError
from mlxd.scheduler.events import RequestKey
from mlxd.scheduler.journal import NoJournal, Then
from mlxd.scheduler.journal_entries import Begun
from mlxd.scheduler.recovery import Recovery
from mlxd.scheduler.stream import Stream
from mlxd.scheduler.transcript import Transcript

NUM_ROWS = 3


def key(name: str) -> RequestKey:
    tenant, _, request_id = name.partition("/")
    return RequestKey(tenant, request_id)


def stream(name: str) -> Stream:
    return Stream(key(name), b"", is_whole=False, transcript=Transcript(name))


class Disk(NoJournal):
    """What outlives processes: open requests in order, and how they were begun. Notes wait until `write`."""

    def __init__(self) -> None:
        self.open: dict[RequestKey, Begun] = {}
        self._waiting: list[tuple[RequestKey, Begun, Then]] = []

    def start(self, key: RequestKey, begun: Begun, then: Then) -> None:
        self._waiting.append((key, begun, then))

    def write(self) -> None:
        waiting, self._waiting = self._waiting, []
        for key, begun, then in waiting:
            if begun is Begun.ALONE:
                self.open |= {k: Begun.AGAIN for k, b in self.open.items() if b is Begun.ALONE}
            if key in self.open:
                self.open[key] = begun
            then(None)

    def crash(self) -> None:
        self._waiting.clear()


@dataclass
class Process:
    """One life of a daemon. `rows`: what its engine was handed and has not ended."""

    disk: Disk
    rows: dict[RequestKey, Stream] = field(default_factory=dict)
    streams: dict[RequestKey, Stream] = field(default_factory=dict)
    given_up: list[RequestKey] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recovery = Recovery(self.disk, self._begin, NUM_ROWS)
        for each, begun in tuple(self.disk.open.items()):
            if begun is Begun.ALONE:
                del self.disk.open[each]
                self.given_up.append(each)
            else:
                self.streams[each] = found = stream("/".join(each))
                self.recovery.add(found, is_suspect=begun is Begun.AGAIN)
        self.recovery.begin()
        self.disk.write()

    def _begin(self, begun: Stream) -> None:
        self.rows[begun.key] = begun

    def send(self, name: str) -> None:
        """Accepted where the engine has it; what is held is not."""
        self.streams[key(name)] = sent = stream(name)
        self.recovery.new(sent)
        if sent.key in self.rows:
            self.disk.open[sent.key] = Begun.ONCE

    def end(self, each: RequestKey) -> None:
        del self.disk.open[each]
        self.recovery.ended(self.rows.pop(each))
        self.disk.write()

    @property
    def names(self) -> set[str]:
        return {"/".join(each) for each in self.rows}


def open_on(disk: Disk, names: Iterable[str], begun: Begun = Begun.ONCE) -> Disk:
    disk.open |= {key(name): begun for name in names}
    return disk


def test_what_was_left_open_begins_in_equal_parts_of_tenants_as_many_as_there_are_rows() -> None:
    process = Process(open_on(Disk(), ["a/1", "a/2", "a/3", "a/4", "b/1", "c/1", "c/2"]))
    assert process.names == {"a/1", "b/1", "c/1"}
    process.send("d/1")
    assert process.names == {"a/1", "b/1", "c/1", "d/1"}
    for ended, begun in (("c/1", "c/2"), ("b/1", ""), ("d/1", ""), ("c/2", "a/2 a/3"), ("a/2", "a/4")):
        before = process.names - {ended}
        process.end(key(ended))
        assert process.names == before.union(begun.split())


def test_a_tenant_whose_requests_do_not_end_holds_up_its_own_alone() -> None:
    names = [f"slow/{number}" for number in range(9)] + [f"quick/{number}" for number in range(9)]
    process = Process(open_on(Disk(), names))
    for number in range(9):
        process.end(key(f"quick/{number}"))
    assert process.names == {"slow/0", "slow/1", "slow/2"}


def test_nothing_begins_before_the_journal_has_noted_it() -> None:
    disk = Disk()
    process = Process(disk)
    process.recovery.add(stream("a/1"), is_suspect=False)
    process.recovery.begin()
    assert process.names == set()
    disk.write()
    assert process.names == {"a/1"}


def test_suspects_begin_one_at_a_time_and_all_others_wait() -> None:
    disk = open_on(open_on(Disk(), ["a/1", "b/1"], Begun.AGAIN), ["c/1"])
    process = Process(disk)
    assert (process.names, disk.open[key("a/1")]) == ({"a/1"}, Begun.ALONE)
    process.send("d/1")
    process.end(key("a/1"))
    assert (process.names, disk.open[key("b/1")]) == ({"b/1"}, Begun.ALONE)
    process.end(key("b/1"))
    assert process.names == {"c/1", "d/1"}
    process.send("d/2")
    assert process.names == {"c/1", "d/1", "d/2"}


def test_who_is_taken_back_never_begins_and_the_next_one_does() -> None:
    process = Process(open_on(open_on(Disk(), ["a/1", "a/2", "a/3"], Begun.AGAIN), ["b/1"]))
    taken = [process.recovery.take_back(process.streams[key(name)]) for name in ("a/1", "a/2", "a/2")]
    assert taken == [False, True, False]
    process.end(key("a/1"))
    assert process.names == {"a/3"}
    process.recovery.stop()
    process.end(key("a/3"))
    assert process.names == set()
    process.send("d/1")
    assert process.names == {"d/1"}


def test_an_end_that_found_no_room_blames_nobody_later() -> None:
    disk = open_on(Disk(), ["a/1"], Begun.AGAIN)
    process = Process(disk)
    assert disk.open[key("a/1")] is Begun.ALONE
    process.recovery.ended(process.rows.pop(key("a/1")))
    disk.write()
    assert disk.open[key("a/1")] is Begun.AGAIN


def test_a_note_that_cannot_be_written_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk(Disk):
        def start(self, key: RequestKey, begun: Begun, then: Then) -> None:
            then(JournalError("journal_failed", "the disk is full"))

    later: list[Any] = []
    loop = type("Loop", (), {"call_later": lambda self, *call: later.append(call)})()
    monkeypatch.setattr("asyncio.get_running_loop", lambda: loop)
    process = Process(open_on(FullDisk(), ["a/1"], Begun.AGAIN))
    process.send("d/1")
    assert process.names == set()
    ((delay_s, again, *what),) = later
    assert delay_s == 1.0
    process.recovery._journal = process.disk = open_on(Disk(), ["a/1"], Begun.AGAIN)
    again(*what)
    process.disk.write()
    assert process.names == {"a/1"}


@pytest.mark.parametrize("seed", range(60))
def test_the_innocent_end_and_each_poisonous_one_ends_after_few_processes(seed: int) -> None:
    dice = random.Random(seed)
    disk = Disk()
    poisonous: set[RequestKey] = set()
    ended: set[RequestKey] = set()
    sent: set[RequestKey] = set()
    given_up: list[RequestKey] = []

    def send(process: Process, *, is_poisonous: bool) -> None:
        name = f"{dice.choice('abc')}/{len(sent)}"
        sent.add(key(name))
        if is_poisonous:
            poisonous.add(key(name))
        process.send(name)

    num_processes = 0
    num_poisonous = dice.randrange(4)
    while not num_processes or disk.open:
        num_processes += 1
        process = Process(disk)
        given_up += process.given_up
        if num_processes <= 3:
            for number in range(dice.randrange(1, 9)):
                send(process, is_poisonous=number == 0 and len(poisonous) < num_poisonous)
        while process.rows:
            one = dice.choice(sorted(process.rows))
            if one in poisonous:
                disk.crash()
                break
            process.end(one)
            ended.add(one)
    accepted = ended.union(given_up)
    assert set(given_up) <= poisonous
    assert poisonous & accepted == set(given_up)
    assert num_processes <= 3 * len(poisonous) + 1


def test_one_poisonous_request_is_given_up_by_the_fourth_process_and_ten_others_are_served() -> None:
    poison, others = "a/poison", {f"b/{number}" for number in range(10)}
    disk = open_on(Disk(), [poison, *sorted(others)])
    for _ in ("second", "third"):
        process = Process(disk)
        while poison not in process.names:
            process.end(key(min(process.names)))
        disk.crash()
    fourth = Process(disk)
    assert fourth.given_up == [key(poison)]
    while fourth.rows:
        fourth.end(key(min(fourth.names)))
    assert not disk.open
