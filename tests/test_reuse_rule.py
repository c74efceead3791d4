"""Where a row may begin, group by group; what is recorded for it, and when others find it."""

import pytest

from mlxd.caches.chain import PageChain
from mlxd.caches.page_pool import PagePool
from mlxd.caches.page_table import PageTable, page_tables
from mlxd.caches.prefix import PrefixCache
from mlxd.caches.sizing import ENDLESS, GroupSpec

SIZE = 4
FULL = GroupSpec("full", (0,), None, SIZE, 1)
SLIDING = GroupSpec("sliding:9", (1,), 9, SIZE, 1)
NARROW = GroupSpec("sliding:1", (1,), 1, SIZE, 1)
STATE = GroupSpec("state", (2,), None, ENDLESS, 0, state_bytes=8)
DENSE = GroupSpec("full:dense", (0,), None, SIZE, 1, until=12, successor="full:packed")
PACKED = GroupSpec("full:packed", (0,), None, SIZE, 1, since=12)

TEXT = "aaaabbbbccccddddeeeeffff"
NUM_PAGES = len(TEXT) // SIZE


class Caches:
    """A prefix cache over small pools, and chains of one text's beginnings."""

    def __init__(self, *specs: GroupSpec, num_pages: int = 16) -> None:
        self.specs = specs
        self.pools = tuple(PagePool(num_pages) for _ in specs)
        self.cache = PrefixCache(specs, self.pools, SIZE, "model", b"")

    def chain(self, text: str = TEXT) -> PageChain:
        chain = self.cache.chain("acme")
        chain.extend(len(text) // SIZE, SIZE, lambda start, end: text[start:end].encode())
        return chain

    def keep(self, *present: str) -> None:
        """One string a group: where it has an "x", the group has the page, or the state, of that place."""
        chain = self.chain()
        for kept, pool, pages in zip(self.cache.groups, self.pools, present, strict=True):
            for index in (i for i, mark in enumerate(pages) if mark == "x"):
                [page] = pool.allocate(1)
                kept.keep(chain.keys[index], chain, page)
                pool.release([page])
        self.check()

    def enter(self, text: str = TEXT) -> "RowOf":
        row = RowOf(self, self.chain(text))
        self.check()
        return row

    def check(self) -> None:
        for pool, kept in zip(self.pools, self.cache.groups, strict=True):
            pool.check_integrity()
            kept.check_integrity()


class RowOf:
    """A row that computes its text by the page, as one in prefill does."""

    def __init__(self, caches: Caches, chain: PageChain) -> None:
        self.chain = chain
        self.tables: tuple[PageTable, ...] = page_tables(caches.specs, caches.pools)
        most = len(chain.keys)
        self.num_found = caches.cache.take(chain, self.tables, most)
        self.marks = caches.cache.mark(chain, self.num_found, most)
        self.num_pages = self.num_found
        self._caches = caches

    def compute(self, num_pages: int) -> "RowOf":
        """Up to so many pages, and plan the position after them."""
        while self.num_pages < num_pages:
            self._plan()
            self.num_pages += 1
        self._plan()
        return self

    def _plan(self) -> None:
        position = self.num_pages * SIZE
        self._caches.cache.record(self.chain, self.tables, position)
        for kept, table in zip(self._caches.cache.groups, self.tables, strict=True):
            table.release_before(position)
            kept.evict(table.pages_short(position + SIZE) - table.num_free)
            table.grow(position + SIZE)
        self._caches.check()

    def leave(self, num_pages: int | None = None) -> None:
        settled = self.num_pages if num_pages is None else num_pages
        self._caches.cache.leave(self.chain, self.tables, settled, self.num_pages * SIZE)
        for table in self.tables:
            table.clear()
        self._caches.check()


@pytest.mark.parametrize(
    ("specs", "present", "found"),
    [
        ((FULL,), ["xxx..."], 3),
        ((FULL,), ["xx.xxx"], 2),
        ((FULL,), [".xxxxx"], 0),
        ((SLIDING,), ["xx...."], 2),
        ((SLIDING,), ["..xx.."], 4),
        ((SLIDING,), ["...x.."], 0),
        ((SLIDING,), ["xx.xx."], 5),
        ((SLIDING,), ["x..x.."], 1),
        ((NARROW,), ["......"], 6),
        ((STATE,), ["..x..."], 3),
        ((STATE,), ["x....x"], 6),
        ((STATE,), ["......"], 0),
        ((FULL, SLIDING), ["xxxxx.", "..xx.."], 4),
        ((FULL, SLIDING), ["xxx...", "..xx.."], 0),
        ((FULL, STATE), ["xxxx..", ".x..x."], 2),
        ((FULL, SLIDING, STATE), ["xxxxxx", "xxxxxx", "..x..."], 3),
        ((FULL, SLIDING, STATE), ["xxxxxx", "..xxxx", "..x..."], 0),
        ((DENSE, PACKED), ["xx....", "......"], 2),
        ((DENSE, PACKED), ["xxx...", "......"], 2),
        ((DENSE, PACKED), ["......", "xxx..."], 3),
        ((DENSE, PACKED), ["xx....", "xxxxx."], 5),
        ((DENSE, PACKED), ["......", ".xxxxx"], 0),
        ((DENSE, PACKED), ["......", "xx...."], 0),
        ((DENSE, PACKED, STATE), ["xx....", "xxxxxx", ".x...."], 2),
    ],
)
def test_a_row_begins_at_the_last_boundary_that_every_group_serving_it_has(
    specs: tuple[GroupSpec, ...], present: list[str], found: int
) -> None:
    caches = Caches(*specs)
    caches.keep(*present)
    row = caches.enter()
    assert row.num_found == found
    for table in row.tables:
        if found and not table.spec.state_bytes and table.spec.serves(found * SIZE):
            assert table.first_page == table.spec.first_live_page(found * SIZE)
            assert table.end == found * SIZE
    row.compute(NUM_PAGES)
    row.leave()


@pytest.mark.parametrize("spec", [SLIDING, STATE])
def test_the_latest_boundary_stays_when_a_row_goes_and_replaces_the_one_before(spec: GroupSpec) -> None:
    caches = Caches(FULL, spec)
    for num_pages in (1, 3, 5):
        row = caches.enter()
        row.chain.marks.clear()
        row.compute(num_pages)
        assert row.chain.pending[1] == set(caches.cache.groups[1].wanted(num_pages))
        row.leave()
        assert caches.enter().num_found == num_pages


def test_a_row_that_goes_at_a_boundary_leaves_its_own_state_there() -> None:
    caches = Caches(STATE, num_pages=1)
    row = caches.enter().compute(1)
    row.num_pages = 2
    slot = row.tables[0].pages
    row.leave()
    assert caches.pools[0].num_idle == 1
    assert caches.pools[0].take_origins() == {}
    assert caches.enter().tables[0].pages == slot
    assert caches.enter("aaaabbbb").num_found == 0, "it is the row's now"


def test_a_boundary_is_its_rows_own_until_it_is_settled() -> None:
    caches = Caches(FULL, STATE)
    row = caches.enter().compute(4)
    assert caches.enter().num_found == 0
    caches.cache.share(row.chain, row.tables, 3)
    assert caches.enter().num_found == 0
    caches.cache.share(row.chain, row.tables, 4)
    assert caches.enter().num_found == 4


def test_what_a_row_computed_after_its_last_settled_page_is_not_found() -> None:
    caches = Caches(FULL, STATE)
    caches.enter().compute(4).leave(num_pages=3)
    assert caches.enter().num_found == 0
    assert len(caches.cache.groups[1]) == 0


@pytest.mark.parametrize("spec", [SLIDING, STATE])
def test_where_texts_part_is_recorded_once_a_second_one_comes_by(spec: GroupSpec) -> None:
    caches = Caches(FULL, spec, num_pages=40)
    texts = [TEXT[:12] + tail * 4 * SIZE for tail in "xyz"]
    found, marks = [], []
    for text in texts:
        row = caches.enter(text)
        found.append(row.num_found)
        marks.append(row.marks)
        row.compute(len(text) // SIZE).leave()
    assert found == [0, 0, 3]
    assert marks == [(7,), (3, 7), (7,)]


def test_dense_pages_that_go_back_are_kept_for_those_that_part_before_the_boundary() -> None:
    caches = Caches(DENSE, PACKED, num_pages=40)
    found = []
    for tail in "xyz":
        row = caches.enter(TEXT[:8] + tail * 16)
        found.append(row.num_found)
        row.compute(6).leave()
    assert found == [0, 0, 2]


def test_a_state_is_copied_from_where_it_is_and_a_later_copy_follows_it() -> None:
    caches = Caches(STATE)
    [pool] = caches.pools
    row = caches.enter().compute(2)
    [slot] = row.tables[0].pages
    row.leave()
    [other] = caches.enter().tables[0].pages
    origins = pool.take_origins()
    assert other in origins
    assert len(origins) == 2
    assert set(origins.values()) == {slot}


def test_a_state_given_up_for_the_row_that_begins_on_it_is_copied_all_the_same() -> None:
    caches = Caches(STATE, num_pages=1)
    caches.keep(".x....")
    row = caches.enter()
    [pool] = caches.pools
    assert row.num_found == 2
    assert pool.take_scrub() == ()
    assert pool.take_origins() == {1: 1}


def test_no_boundary_is_recorded_at_the_cost_of_a_row() -> None:
    caches = Caches(STATE, num_pages=2)
    rows = [caches.enter().compute(2) for _ in range(2)]
    assert len(caches.cache.groups[0]) == 0
    for row in rows:
        row.leave()
    assert caches.enter().num_found == 0


def test_a_fault_drops_all_that_begins_alike_of_every_group_and_pending() -> None:
    caches = Caches(FULL, SLIDING, STATE)
    caches.enter().compute(2).leave()
    bad, other = caches.enter().compute(4), caches.enter(TEXT[:12] + "zzzz").compute(3)
    apart = caches.enter("wwwwvvvv").compute(2)
    apart.leave()
    keys = caches.cache.forget(bad.chain)
    assert set(keys) >= set(bad.chain.keys)
    bad.leave()
    other.leave()
    assert caches.enter().num_found == 0
    assert caches.enter("wwwwvvvv").num_found == 2
    assert caches.enter("wwwwvvvvuuuu").num_found == 2
