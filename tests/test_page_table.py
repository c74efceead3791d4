import itertools

import pytest

from mlxd.caches.page_pool import PagePool, PoolExhaustedError
from mlxd.caches.page_table import PageTable
from mlxd.caches.sizing import GroupSpec


def make_table(window: int | None, num_pages: int = 10, page_size: int = 4) -> tuple[PageTable, PagePool]:
    pool = PagePool(num_pages)
    return PageTable(GroupSpec("group", (0,), window, page_size, 1), pool), pool


@pytest.mark.parametrize(("end", "num_pages"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_growing_gives_room_for_every_position_and_no_page_more(end: int, num_pages: int) -> None:
    table, pool = make_table(None)
    assert table.pages_short(end) == num_pages
    table.grow(end)
    assert len(table.pages) == pool.num_held == num_pages
    assert table.end >= end
    assert table.pages_short(end) == 0


def test_growing_past_the_pool_takes_nothing() -> None:
    table, pool = make_table(None, num_pages=2)
    table.grow(4)
    with pytest.raises(PoolExhaustedError):
        table.grow(13)
    assert (len(table.pages), pool.num_free) == (1, 1)


@pytest.mark.parametrize(
    ("window", "position", "start"),
    [
        (None, 19, 0),
        (1, 19, 16),
        (4, 3, 0),
        (4, 6, 0),
        (4, 7, 4),
        (5, 7, 0),
        (5, 8, 4),
        (8, 15, 8),
        (9, 15, 4),
        (100, 19, 0),
    ],
)
def test_a_window_gives_back_the_pages_no_later_query_reads(
    window: int | None, position: int, start: int
) -> None:
    table, pool = make_table(window)
    table.grow(20)
    table.release_before(position)
    assert table.start == start
    assert table.end == 20
    assert pool.num_held == (20 - start) // 4


def test_pages_keep_their_positions_when_older_ones_leave() -> None:
    table, _ = make_table(4)
    table.grow(12)
    last = table.pages[-1]
    table.release_before(11)
    table.grow(16)
    assert (table.first_page, table.start, table.end) == (2, 8, 16)
    assert table.pages[0] == last


def test_clearing_gives_all_back_and_starts_over() -> None:
    table, pool = make_table(4)
    table.grow(16)
    table.release_before(12)
    table.clear()
    assert (table.start, table.end, pool.num_free) == (0, 0, 10)
    pool.check_integrity()


def test_the_version_changes_exactly_when_the_pages_do() -> None:
    table, _ = make_table(4)
    versions = [table.version]
    for act in (
        lambda: table.grow(6),
        lambda: table.grow(8),
        lambda: table.release_before(3),
        lambda: table.release_before(7),
        table.clear,
    ):
        act()
        versions.append(table.version)
    changed = [after != before for before, after in itertools.pairwise(versions)]
    assert changed == [True, False, False, True, True]
