import pytest

from mlxd.caches.page_pool import SCRATCH_PAGE, PagePool, PoolExhaustedError


def test_every_page_is_handed_out_once_and_never_the_scratch_page() -> None:
    pool = PagePool(5)
    pages = pool.allocate(2) + pool.allocate(3)
    assert sorted(pages) == [1, 2, 3, 4, 5]
    assert SCRATCH_PAGE not in pages
    assert (pool.num_free, pool.num_held) == (0, 5)


def test_a_failed_allocation_takes_nothing() -> None:
    pool = PagePool(3)
    pool.allocate(2)
    with pytest.raises(PoolExhaustedError, match="2 pages asked for, 1 of 3 free"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check_integrity()


def test_a_shared_page_is_free_when_its_last_owner_gives_it_back() -> None:
    pool = PagePool(1)
    [page] = pool.allocate(1)
    pool.retain(page)
    pool.release([page])
    assert pool.num_free == 0
    pool.release([page])
    assert pool.num_free == 1


@pytest.mark.parametrize("act", [PagePool.retain, lambda pool, page: pool.release([page])])
def test_a_free_page_can_be_neither_shared_nor_given_back(act) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(AssertionError):
        act(PagePool(2), 1)


def test_a_page_is_scrubbed_between_two_owners_and_reported_once() -> None:
    pool = PagePool(2)
    first = pool.allocate(2)
    assert pool.take_scrub() == (), "pages nobody wrote are clean"
    pool.release(first)
    assert pool.take_scrub() == (), "leaving costs nothing"
    pool.allocate(1)
    assert set(pool.take_scrub()) == set(first)
    pool.allocate(1)
    assert pool.take_scrub() == ()


def test_a_scrub_covers_a_whole_allocation_however_large() -> None:
    pool = PagePool(300)
    pool.release(pool.allocate(300))
    pages = pool.allocate(250)
    assert set(pages) <= set(pool.take_scrub())


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._clean.append(pool._clean[0]),
        lambda pool: pool._clean.pop(),
        lambda pool: pool._references.__setitem__(pool._clean[0], 1),
        lambda pool: pool._references.__setitem__(SCRATCH_PAGE, 1),
    ],
    ids=["free twice", "lost", "free and held", "scratch owned"],
)
def test_integrity_check_finds(damage) -> None:  # type: ignore[no-untyped-def]
    pool = PagePool(4)
    pool.allocate(1)
    pool.check_integrity()
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check_integrity()


def test_dirty_pages_can_be_zeroed_at_once() -> None:
    pool = PagePool(4)
    pages = pool.allocate(3)
    pool.release(pages)
    pool.scrub_dirty()
    assert sorted(pool.take_scrub()) == sorted(pages)
    assert (pool.take_scrub(), pool.num_free) == ((), 4)
    pool.check_integrity()


def test_a_page_that_the_cache_alone_keeps_is_idle_and_free_once_dropped() -> None:
    pool = PagePool(3)
    first, second = pool.allocate(2)
    pool.keep(first, "acme")
    assert (pool.num_idle, pool.num_used, pool.num_kept) == (0, 2, 1)
    pool.release([first])
    assert (pool.num_idle, pool.num_used) == (1, 1)
    pool.retain(first)
    assert (pool.num_idle, pool.num_used) == (0, 2)
    pool.release([first, second])
    assert (pool.num_idle, pool.num_used, pool.num_free) == (1, 0, 2)
    pool.check_integrity()
    pool.drop(first)
    assert (pool.num_idle, pool.num_kept, pool.num_free) == (0, 0, 3)
    pool.check_integrity()


def test_a_page_is_kept_once() -> None:
    pool = PagePool(1)
    [page] = pool.allocate(1)
    pool.keep(page, "acme")
    with pytest.raises(AssertionError, match="kept twice"):
        pool.keep(page, "acme")


def test_a_page_that_is_filled_is_not_scrubbed_and_is_reported_once() -> None:
    pool = PagePool(2)
    pool.release(pool.allocate(2))
    target, other = pool.allocate(2)
    pool.fill(target, other)
    assert pool.take_scrub() == (other,)
    assert pool.take_origins() == {target: other}
    assert pool.take_origins() == {}


def test_what_a_page_was_to_be_filled_with_is_forgotten_when_it_is_freed() -> None:
    pool = PagePool(2)
    page, other = pool.allocate(2)
    pool.fill(page, other)
    pool.release([page])
    assert pool.take_origins() == {}
    [again] = pool.allocate(1)
    assert (again, pool.take_scrub()) == (page, (page,))


def test_until_the_launch_a_filled_pages_content_is_where_it_comes_from() -> None:
    pool = PagePool(3)
    first, second, third = pool.allocate(3)
    pool.fill(second, first)
    pool.fill(third, pool.origin(second))
    assert pool.origin(third) == first
    pool.take_origins()
    assert pool.origin(third) == third
