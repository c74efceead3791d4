"""Speculative rounds of rows that are packed on their way: a keep per row, packed once it is resolved."""

from collections.abc import Sequence

import numpy as np
import pytest
from cache_subjects import BOUNDARY, delayed

from mlxd.caches.conformance_rows import Rows
from mlxd.caches.delayed import DelayedRows

APPENDS = 2
BEFORE = (BOUNDARY - 2, BOUNDARY + 4, 3, BOUNDARY - 3)
"""One row that a whole round takes to its boundary, one that is packed, two that stay dense."""


def rows_at(offsets: Sequence[int], window: int | None) -> tuple[Rows, DelayedRows]:
    rows = Rows(delayed(window))
    for row, offset in enumerate(offsets):
        rows.join(row)
        for _ in range(offset):
            rows.append([row])
    assert isinstance(rows.cache, DelayedRows)
    return rows, rows.cache


def round_of(window: int | None) -> tuple[Rows, DelayedRows]:
    """A round of `APPENDS`, left open."""
    rows, cache = rows_at([offset - 1 for offset in BEFORE], window)
    rows.append()
    cache.spec_round_begin()
    for _ in range(APPENDS):
        rows.append()
    return rows, cache


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize(
    "keep", [(2, 0, 1, 2), (1, 2, 0, 0), (0, 1, 2, 1), (2, 2, 2, 2), (0, 0, 0, 0)], ids=str
)
def test_each_row_keeps_what_it_accepted_and_is_packed_where_it_then_is(
    keep: tuple[int, ...], window: int | None
) -> None:
    rows, cache = round_of(window)
    cache.spec_round_rollback(keep)
    kept = tuple(before + count for before, count in zip(BEFORE, keep, strict=True))
    assert cache.row_offsets == kept
    assert cache.row_floors == tuple(BOUNDARY if offset >= BOUNDARY else 0 for offset in kept)
    rows.adopt_offsets()
    twin, _ = rows_at(kept, window)
    for _ in range(5):
        found, expected = rows.append(), twin.append()
        for row in expected:
            np.testing.assert_array_equal(found[row], expected[row])


@pytest.mark.parametrize("window", [None, 1, 6])
def test_an_accepted_round_packs_the_rows_that_reached_their_boundary(window: int | None) -> None:
    rows, cache = round_of(window)
    assert cache.max_append_tokens() == 1
    cache.spec_round_commit()
    assert cache.row_floors == (BOUNDARY, BOUNDARY, 0, 0)
    twin, _ = rows_at([before + APPENDS for before in BEFORE], window)
    for _ in range(5):
        found, expected = rows.append(), twin.append()
        for row in expected:
            np.testing.assert_array_equal(found[row], expected[row])
