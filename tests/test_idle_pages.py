"""Whose cached pages are given up: of whoever keeps most for its weight, there the least recently used."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxd.caches.chain import PageChain
from mlxd.caches.idle_pages import IdlePages
from mlxd.caches.kept_pages import KeptPages
from mlxd.caches.page_pool import PagePool
from mlxd.caches.sizing import GroupSpec

SPEC = GroupSpec("full", (0,), None, 4, 1)
NUM_PAGES = 12
NAMES = ("a", "b", "c")


@pytest.mark.parametrize(
    ("counts", "weights", "given_up"),
    [
        ({"a": 3}, {"a": 1}, "aaa"),
        ({"a": 2, "b": 5}, {"a": 1, "b": 1}, "bbbabab"),
        ({"a": 2, "b": 5}, {"a": 1, "b": 4}, "ababbbb"),
        ({"a": 4, "b": 4}, {"a": 0.5, "b": 1}, "aaabbabb"),
        ({"a": 2, "b": 9}, {"b": 9}, "aabbb"),
        ({"a": 3, "b": 1}, {}, "aaab"),
    ],
    ids=["alone", "equal weights", "weights", "small weight", "without a weight", "none has a weight"],
)
def test_who_keeps_most_for_its_weight_gives_up_the_next_page(
    counts: dict[str, int], weights: dict[str, float], given_up: str
) -> None:
    idle = _idle(counts, weights)
    for namespace in given_up:
        assert idle.largest == namespace
        idle.remove(namespace)


def _idle(counts: Mapping[str, int], weights: Mapping[str, float]) -> IdlePages:
    idle = IdlePages()
    idle.weigh(weights)
    for namespace, count in counts.items():
        for _ in range(count):
            idle.add(namespace)
    return idle


def test_new_weights_hold_from_the_next_page_on() -> None:
    idle = _idle({"a": 4, "b": 6}, {"a": 1, "b": 1})
    assert idle.largest == "b"
    idle.weigh({"a": 1, "b": 2})
    assert idle.largest == "a"
    idle.weigh({"a": 1})
    assert idle.largest == "b"


@settings(max_examples=200)
@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 40), min_size=1),
    st.fixed_dictionaries({name: st.integers(1, 9) for name in "abcdef"}),
)
def test_nobody_with_less_than_its_part_gives_up_a_page_until_none_is_left(
    counts: dict[str, int], weights: dict[str, int]
) -> None:
    idle = _idle(counts, weights)
    while idle.total:
        name, keepers = idle.largest, +idle.counts
        part = idle.total * weights[name] / sum(weights[other] for other in keepers)
        assert keepers[name] >= part
        idle.remove(name)


@dataclass(slots=True)
class Entry:
    key: tuple[int, int]
    namespace: str
    is_held: bool = False


class PlainCache:
    """What `KeptPages` does, by looking at every page each time."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.weights: Mapping[str, float] = {}

    def evict(self) -> None:
        idle = Counter(entry.namespace for entry in self.entries if not entry.is_held)
        if not idle:
            return
        shares = {
            name: idle[name] / self.weights[name] if name in self.weights else math.inf for name in idle
        }
        largest = min(idle, key=lambda name: (-shares[name], name))
        mine = [entry for entry in self.entries if entry.namespace == largest]
        in_use = mine[: next(i for i, entry in enumerate(mine) if not entry.is_held)]
        self.entries.remove(mine[len(in_use)])
        for entry in in_use:
            self.move(entry)

    def move(self, entry: Entry, *, to_front: bool = False) -> None:
        self.entries.remove(entry)
        self.entries.insert(0 if to_front else len(self.entries), entry)


class Pair:
    """The cache and the plain one, told the same."""

    def __init__(self) -> None:
        self.pool = PagePool(NUM_PAGES)
        self.kept = KeptPages(SPEC, self.pool, SPEC.page_size)
        self.plain = PlainCache()
        self.num_keys = 0

    def weigh(self, weights: Mapping[str, float]) -> None:
        self.kept.weigh(weights)
        self.plain.weights = weights

    def evict(self, count: int) -> None:
        self.kept.evict(count)
        for _ in range(count):
            self.plain.evict()

    def keep(self, namespace: str) -> None:
        if not self.pool.num_free:
            self.evict(1)
        if self.pool.num_free:
            self.num_keys += 1
            entry = Entry((self.num_keys, 0), namespace)
            chain = PageChain(self.num_keys, namespace, b"", 1)
            chain.extend(1, SPEC.page_size, lambda start, end: range(start, end))
            [page] = self.pool.allocate(1)
            self.kept.keep(entry.key, chain, page)
            self.pool.release([page])
            self.plain.entries.append(entry)

    def use(self, name: str, number: int) -> None:
        """Do something with one of the pages, if there is any."""
        if not self.plain.entries:
            return
        entry = self.plain.entries[number % len(self.plain.entries)]
        page = self.kept.page(entry.key)
        assert page is not None
        if name == "touch":
            self.kept.touch([entry.key])
            self.plain.move(entry)
        elif name == "rank":
            self.kept.rank(entry.key, is_first=True)
            self.plain.move(entry, to_front=True)
        elif name == "drop" and not entry.is_held:
            self.kept.drop(entry.key)
            self.plain.entries.remove(entry)
        elif name == "hold":
            self._hold(entry, page)

    def _hold(self, entry: Entry, page: int) -> None:
        """A row takes it, or the one that has it gives it back."""
        if entry.is_held:
            self.pool.release([page])
        else:
            self.pool.retain(page)
        entry.is_held = not entry.is_held

    def check(self) -> None:
        self.pool.check_integrity()
        self.kept.check_integrity()
        keys = {(number, 0) for number in range(1, self.num_keys + 1)}
        assert {key for key in keys if key in self.kept} == {entry.key for entry in self.plain.entries}


Act = tuple[Callable[..., None], Sequence[object]]
"""A method of Pair, and what it is called with."""


def _acts(method: Callable[..., None], *arguments: st.SearchStrategy[object]) -> st.SearchStrategy[Act]:
    return st.tuples(st.just(method), st.tuples(*arguments))


acts = st.one_of(
    _acts(Pair.keep, st.sampled_from(NAMES)),
    _acts(Pair.evict, st.integers(1, 4)),
    _acts(Pair.weigh, st.dictionaries(st.sampled_from(NAMES), st.sampled_from([0.5, 1.0, 3.0]))),
    _acts(Pair.use, st.sampled_from(["touch", "rank", "drop", "hold"]), st.integers(0, NUM_PAGES)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(acts, max_size=60))
def test_whatever_happens_the_same_pages_go_as_if_all_were_looked_at_each_time(trace: list[Act]) -> None:
    pair = Pair()
    for method, arguments in trace:
        method(pair, *arguments)
        pair.check()
    while pair.pool.num_idle:
        pair.evict(1)
        pair.check()
