"""What rows of both sorts lend: each from where it is stored, whatever is beside it and comes after."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from cache_subjects import BOUNDARY, HEADS, delayed, vectors

from mlxd.caches.conformance_rows import NUM_PAGES, Rows, mark
from mlxd.caches.contract import KvDonorRows
from mlxd.caches.delayed import DelayedRows

QUERIES = mx.sin(3.1 * mx.arange(4 * 2 * HEADS * 32).reshape(4, 2 * HEADS, 1, 32))
COHORTS = [(3, 12, BOUNDARY, 5), (BOUNDARY, BOUNDARY - 1, BOUNDARY + 1, 1), (12, 10), (2, 7)]
WINDOWS = [None, 1, 5, 6]


def cache_at(offsets: Sequence[int], window: int | None) -> tuple[Rows, DelayedRows]:
    rows = Rows(delayed(window))
    for row, offset in enumerate(offsets):
        rows.join(row)
        for _ in range(offset - 1):
            rows.append([row])
    rows.append()
    assert isinstance(rows.cache, DelayedRows)
    return rows, rows.cache


def columns_of(lent: KvDonorRows, row: int) -> tuple[np.ndarray, np.ndarray]:
    live = slice(lent.starts[row], lent.ends[row])
    return np.array(lent.keys[row, :, live]), np.array(lent.values[row, :, live])


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("offsets", COHORTS, ids=str)
def test_a_row_lends_what_it_lends_alone(offsets: tuple[int, ...], window: int | None) -> None:
    _, cache = cache_at(offsets, window)
    lent, donor = cache.capture_donor_rows(), cache.capture_donor_attention()
    assert donor.offsets == lent.offsets == offsets
    attended = np.array(donor.attend(QUERIES[: len(offsets)], 0.2))
    for row, offset in enumerate(offsets):
        rows = Rows(delayed(window))
        rows.join(row)
        for _ in range(offset):
            rows.append()
        alone, own = rows.cache.capture_donor_rows(), rows.cache.capture_donor_attention()  # type: ignore[attr-defined]
        for found, expected in zip(columns_of(lent, row), columns_of(alone, 0), strict=True):
            assert found.shape[1] == min(window or offset, offset)
            np.testing.assert_array_equal(found, expected)
        expected = np.array(own.attend(QUERIES[row : row + 1], 0.2))
        np.testing.assert_allclose(attended[row : row + 1], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", WINDOWS)
def test_what_was_lent_survives_conversion_appends_leaves_and_disposal(window: int | None) -> None:
    """Both dense rows are packed afterwards, one of them in the very next step."""
    rows, cache = cache_at((BOUNDARY - 1, 12, 3), window)
    donor = cache.capture_donor_attention()
    before = np.array(cache.capture_donor_attention().attend(QUERIES[:3], 0.2))
    rows.append()
    assert cache.row_floors == (BOUNDARY, BOUNDARY, 0)
    for _ in range(6):
        rows.append()
    assert cache.row_floors == (BOUNDARY, BOUNDARY, BOUNDARY)
    rows.leave(1)
    rows.scrub(mx.arange(NUM_PAGES + 1))
    cache.dispose()
    np.testing.assert_array_equal(np.array(donor.attend(QUERIES[:3], 0.2)), before)
    assert donor.offsets == (BOUNDARY - 1, 12, 3)


@pytest.mark.parametrize("window", WINDOWS)
def test_lending_appends_and_converts_nothing(window: int | None) -> None:
    rows, cache = cache_at((BOUNDARY - 1, 12), window)
    before = [np.array(array) for array in cache.state()]
    mx.eval(cache.capture_donor_attention().attend(QUERIES[:2], 0.2))
    assert cache.row_offsets == (BOUNDARY - 1, 12)
    for array, kept in zip(cache.state(), before, strict=True):
        np.testing.assert_array_equal(np.array(array), kept)
    twin, _ = cache_at((BOUNDARY - 1, 12), window)
    for _ in range(3):
        found, expected = rows.append(), twin.append()
        for row in expected:
            np.testing.assert_array_equal(found[row], expected[row])


def test_a_packed_row_attends_to_its_codes_and_a_dense_one_to_its_numbers() -> None:
    """Dense rows lend their numbers to the last bit; packed ones do not have them any more."""
    _, cache = cache_at((5, 12), None)
    lent = cache.capture_donor_rows()
    for row, is_packed in ((0, False), (1, True)):
        marks = mx.array([[mark(row, at) for at in range(lent.offsets[row])]])
        exact = np.array(vectors(marks, 32, 0))[0]
        found, _ = columns_of(lent, row)
        np.testing.assert_allclose(found, exact, atol=1e-2)
        assert (np.abs(found - exact).max() > 1e-4) == is_packed
