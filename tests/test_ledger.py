import pytest

from mlxd.batching.fake_runner import fake_memory
from mlxd.caches.ledger import Ledger, Reservation

MEMORY = fake_memory(page_size=16, chunk=16, num_pages=10, window=32, num_window_pages=8)
PAGE_BYTES = 16 * 64


@pytest.mark.parametrize(
    ("num_tokens", "pages"), [(1, (1, 1)), (16, (1, 1)), (17, (2, 2)), (64, (4, 4)), (160, (10, 4))]
)
def test_worst_case_counts_pages_of_each_group(num_tokens: int, pages: tuple[int, ...]) -> None:
    assert Ledger(MEMORY).worst_case(num_tokens) == Reservation(pages)


def test_reservations_add_up_and_return_to_zero() -> None:
    ledger = Ledger(MEMORY)
    ledger.reserve(1, Reservation((4, 2)))
    ledger.reserve(2, Reservation((3, 1)))
    assert ledger.reserved_bytes == 10 * PAGE_BYTES
    assert ledger.room == (3, 5)
    ledger.release(1)
    ledger.release(2)
    assert (ledger.reserved_bytes, ledger.room) == (0, (10, 8))
    ledger.check_integrity()


def test_a_group_that_a_row_is_done_with_is_free_for_others() -> None:
    ledger = Ledger(MEMORY)
    ledger.reserve(1, Reservation((4, 7)))
    assert not ledger.fits(Reservation((1, 2)))
    for _ in range(2):
        ledger.give_back(1, 1)
        ledger.check_integrity()
        assert ledger.room == (6, 8)
    assert ledger.fits(Reservation((1, 2)))
    ledger.release(1)
    assert ledger.reserved_bytes == 0


@pytest.mark.parametrize(
    ("overcommit", "pages", "fits"),
    [
        (1.0, (6, 5), True),
        (1.0, (7, 5), False),
        (1.0, (6, 6), False),
        (1.5, (11, 9), True),
        (1.5, (12, 9), False),
    ],
)
def test_a_reservation_fits_only_where_every_group_holds_it(
    overcommit: float, pages: tuple[int, ...], fits: bool
) -> None:
    ledger = Ledger(MEMORY, overcommit)
    ledger.reserve(1, Reservation((4, 3)))
    assert ledger.fits(Reservation(pages)) is fits
    if not fits:
        with pytest.raises(AssertionError, match="row 2 does not fit"):
            ledger.reserve(2, Reservation(pages))


def test_overcommit_does_not_make_room_for_a_row_larger_than_the_machine() -> None:
    ledger = Ledger(MEMORY, overcommit=4.0)
    assert ledger.ever_fits(Reservation((10, 8)))
    assert not ledger.ever_fits(Reservation((11, 1)))


def test_a_row_reserves_once() -> None:
    ledger = Ledger(MEMORY)
    ledger.reserve(1, Reservation((1, 1)))
    with pytest.raises(AssertionError, match="row 1 is reserved already"):
        ledger.reserve(1, Reservation((1, 1)))


def test_integrity_check_finds_a_total_that_is_not_the_sum_of_its_rows() -> None:
    ledger = Ledger(MEMORY)
    ledger.reserve(1, Reservation((1, 1)))
    ledger._totals[0] += 1
    with pytest.raises(AssertionError):
        ledger.check_integrity()
