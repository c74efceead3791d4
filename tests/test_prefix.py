"""The prefix cache alone: what is found, what is given up first, and who never shares."""

import random

import pytest

from mlxd.caches.chain import PageChain
from mlxd.caches.page_pool import PagePool
from mlxd.caches.page_table import PageTable
from mlxd.caches.prefix import PrefixCache
from mlxd.caches.sizing import GroupSpec

SIZE = 4
SECRET = b"s" * 32
FULL = GroupSpec("full", (0,), None, SIZE, 1)
OTHER = GroupSpec("full:q8", (1,), None, SIZE, 1)


class Rows:
    """Rows that come, grow and go over a cache of two groups."""

    def __init__(self, num_pages: int = 32) -> None:
        self.pools = (PagePool(num_pages), PagePool(num_pages))
        self.cache = PrefixCache((FULL, OTHER), self.pools, SIZE, "model", SECRET)

    def enter(self, tokens: str, namespace: str = "acme", *, most: int | None = None) -> "RowOf":
        chain = self.cache.chain(namespace)
        chain.extend(len(tokens) // SIZE, SIZE, lambda start, end: tokens[start:end].encode())
        most = len(tokens) // SIZE if most is None else most
        tables = (PageTable(FULL, self.pools[0]), PageTable(OTHER, self.pools[1]))
        num_found = self.cache.take(chain, tables, most)
        for table in tables:
            table.grow(len(tokens))
        self.check()
        return RowOf(self, chain, tables, num_found, len(tokens) // SIZE)

    def found(self, tokens: str, namespace: str = "acme") -> int:
        """Cached pages of these tokens; the look is a use."""
        row = self.enter(tokens, namespace)
        row.leave(num_pages=0)
        return row.num_found

    def evict(self, count: int) -> None:
        for kept in self.cache.groups:
            kept.evict(count)
        self.check()

    @property
    def num_idle(self) -> int:
        """Pages of each group that only the cache holds."""
        [number] = {pool.num_idle for pool in self.pools}
        return number

    def check(self) -> None:
        for pool, kept in zip(self.pools, self.cache.groups, strict=True):
            pool.check_integrity()
            kept.check_integrity()


class RowOf:
    def __init__(
        self, rows: Rows, chain: PageChain, tables: tuple[PageTable, ...], num_found: int, num_full: int
    ) -> None:
        self.num_found = num_found
        self.tables = tables
        self.chain = chain
        self._rows = rows
        self._num_full = num_full

    def share(self) -> None:
        self._rows.cache.share(self.chain, self.tables, self._num_full)
        self._rows.check()

    def forget(self) -> None:
        self._rows.cache.forget(self.chain)
        self._rows.check()

    def leave(self, num_pages: int | None = None) -> None:
        num_pages = self._num_full if num_pages is None else num_pages
        self._rows.cache.leave(self.chain, self.tables, num_pages, num_pages * SIZE)
        for table in self.tables:
            table.clear()
        self._rows.check()


@pytest.mark.parametrize(
    ("left", "asked", "num_pages"),
    [
        ("aaaabbbb", "aaaabbbb", 2),
        ("aaaabbbb", "aaaabbbbcccc", 2),
        ("aaaabbbbcccc", "aaaabbbb", 2),
        ("aaaabbbb", "aaaabbbx", 1),
        ("aaaabbbb", "aaaxbbbb", 0),
        ("aaaabbbb", "bbbb", 0),
        ("aaaabbb", "aaaabbbb", 1),
        ("aaa", "aaaa", 0),
        ("", "aaaa", 0),
    ],
)
def test_the_longest_run_of_full_pages_with_equal_tokens_is_found(
    left: str, asked: str, num_pages: int
) -> None:
    rows = Rows()
    rows.enter(left).leave()
    assert rows.found(asked) == num_pages


def test_found_pages_are_the_pages_that_were_left() -> None:
    rows = Rows()
    first = rows.enter("aaaabbbb")
    pages = [list(table.pages) for table in first.tables]
    first.leave()
    second = rows.enter("aaaabbbbcc")
    assert [table.pages[:2] for table in second.tables] == pages


def test_a_look_may_be_bounded() -> None:
    rows = Rows()
    rows.enter("aaaabbbb").leave()
    assert rows.enter("aaaabbbb", most=1).num_found == 1


def test_namespaces_models_and_secrets_share_no_key() -> None:
    rows = Rows()
    rows.enter("aaaabbbb", "acme").leave()
    assert rows.found("aaaabbbb", "beta") == 0
    caches = [
        PrefixCache((FULL, OTHER), rows.pools, SIZE, identity, secret)
        for identity in ("model", "model2")
        for secret in (SECRET, b"")
    ]
    keys: list[bytes] = []
    for cache in caches:
        for namespace in ("acme", "acmem", "beta"):
            chain = cache.chain(namespace)
            chain.extend(1, SIZE, lambda start, end: (1, 2, 3, 4))
            keys += chain.keys
    assert len(set(keys)) == len(keys) == 12


def test_unused_pages_go_least_recently_used_first_and_leaves_before_what_they_hang_on() -> None:
    rows = Rows()
    for tokens in ("aaaabbbb", "aaaacccc", "dddd", "aaaabbbb"):
        rows.enter(tokens).leave()
    order = []
    while rows.num_idle:
        rows.evict(1)
        chains = ("aaaabbbb", "aaaacccc", "dddd")
        order.append([len(_cached(rows, tokens)) for tokens in chains])
    assert order == [[2, 1, 1], [2, 1, 0], [1, 1, 0], [0, 0, 0]]
    assert [kept.num_evicted for kept in rows.cache.groups] == [4, 4]
    assert all(pool.num_free == pool.num_pages for pool in rows.pools)


def _cached(rows: Rows, tokens: str) -> list[bytes]:
    """Keys that are there, without using them."""
    chain = rows.cache.chain("acme")
    chain.extend(len(tokens) // SIZE, SIZE, lambda start, end: tokens[start:end].encode())
    return [key for key in chain.keys if key in rows.cache.groups[0]]


def test_pages_of_running_rows_are_never_given_up() -> None:
    rows = Rows()
    rows.enter("aaaabbbb").leave()
    user = rows.enter("aaaabbbb", most=1)
    rows.evict(10)
    assert [len(_cached(rows, tokens)) for tokens in ("aaaa", "aaaabbbb")] == [1, 1]
    user.leave()
    assert rows.num_idle == 2


def test_a_running_rows_pages_are_found_once_it_shares_them() -> None:
    rows = Rows()
    first = rows.enter("aaaabbbb")
    assert rows.found("aaaabbbb") == 0
    first.share()
    second = rows.enter("aaaabbbb")
    assert second.num_found == 2
    first.leave()
    assert rows.num_idle == 0
    second.leave()
    assert rows.num_idle == 2


def test_of_two_rows_with_equal_pages_one_keeps_them_and_both_share_what_comes_after() -> None:
    rows = Rows()
    first, second = rows.enter("aaaabbbb"), rows.enter("aaaacccc")
    first.share()
    second.share()
    assert len(_cached(rows, "aaaacccc")) == 2
    second.leave()
    first.leave()
    assert (rows.found("aaaabbbb"), rows.found("aaaacccc")) == (2, 2)
    assert [pool.num_held for pool in rows.pools] == [3, 3]


def test_what_is_forgotten_goes_with_all_that_hangs_on_it_and_is_not_put_back_by_its_users() -> None:
    rows = Rows()
    rows.enter("aaaabbbb").leave()
    bad, innocent = rows.enter("aaaacccc"), rows.enter("aaaabbbbdddd")
    other = rows.enter("eeee")
    other.leave()
    bad.forget()
    bad.share()
    bad.leave()
    innocent.share()
    innocent.leave()
    assert [rows.found(tokens) for tokens in ("aaaabbbbdddd", "aaaacccc", "eeee")] == [0, 0, 1]
    assert [pool.num_held for pool in rows.pools] == [1, 1]


def test_pages_of_a_preempted_row_are_forgotten_too() -> None:
    rows = Rows()
    row = rows.enter("aaaabbbb")
    row.leave()
    row.forget()
    assert rows.found("aaaabbbb") == 0
    assert rows.num_idle == 0


@pytest.mark.parametrize("seed", range(40))
def test_random_rows_leave_references_order_and_pages_consistent(seed: int) -> None:
    rng = random.Random(seed)
    rows, live = Rows(num_pages=64), []
    for _ in range(150):
        act = rng.randrange(6)
        if act <= 1 and len(live) < 6:
            tokens = "".join(rng.choice("ab") * SIZE for _ in range(rng.randrange(1, 5)))
            rows.evict(max(0, 5 - rows.pools[0].num_free))
            live.append(rows.enter(tokens, rng.choice(["acme", "beta"])))
        elif act == 2 and live:
            rng.choice(live).share()
        elif act == 3:
            rows.evict(rng.randrange(4))
        elif live:
            row = live.pop(rng.randrange(len(live)))
            if rng.random() < 0.1:
                row.forget()
            row.leave()
        rows.check()
    for row in live:
        row.leave()
    unused = rows.num_idle
    assert [pool.num_held for pool in rows.pools] == [unused, unused]
    rows.evict(unused)
    assert all(pool.num_held == 0 for pool in rows.pools)


def test_a_cleared_cache_has_nothing_to_find_or_to_tell_and_what_ran_meanwhile_adds_nothing() -> None:
    rows = Rows()
    rows.cache = PrefixCache((FULL, OTHER), rows.pools, SIZE, "model", SECRET, most_new=8)
    rows.enter("aaaabbbb").leave()
    running = rows.enter("ccccdddd")
    running.share()
    assert rows.cache.num_new == 8
    rows.cache.clear()
    rows.check()
    running.leave()
    assert [rows.num_idle, rows.cache.num_new, rows.found("aaaabbbb"), rows.found("ccccdddd")] == [0] * 4
    assert [pool.num_used for pool in rows.pools] == [0, 0]
    rows.enter("aaaabbbb").leave()
    assert rows.found("aaaabbbb") == 2
