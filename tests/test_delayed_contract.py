"""Rows packed on their way: the contract's members."""

import math

import mlx.core as mx
import numpy as np
import pytest
from cache_subjects import BOUNDARY, delayed
from tiny_models import CHUNK

from mlxd.caches.conformance_rows import Rows
from mlxd.caches.delayed import DelayedRows
from mlxd.caches.paged_view import PrefillView
from mlxd.caches.quantization import Quantization

FOUR_BITS = Quantization(bits=4, group_size=32, start=CHUNK + 1)


def rows_at(*offsets: int, window: int | None = None) -> tuple[Rows, DelayedRows]:
    rows = Rows(delayed(window))
    for row, offset in enumerate(offsets):
        rows.join(row, offset - 1)
    rows.append()
    assert isinstance(rows.cache, DelayedRows)
    return rows, rows.cache


@pytest.mark.parametrize(
    ("offsets", "appends", "floors"),
    [
        ((5,), BOUNDARY - 5, (0,)),
        ((BOUNDARY - 1,), 1, (0,)),
        ((BOUNDARY,), math.inf, (BOUNDARY,)),
        ((BOUNDARY + 9, 3, 6), BOUNDARY - 6, (BOUNDARY, 0, 0)),
    ],
)
def test_appends_left_and_floor_follow_from_each_rows_length(
    offsets: tuple[int, ...], appends: float, floors: tuple[int, ...]
) -> None:
    _, cache = rows_at(*offsets)
    assert cache.max_append_tokens() == appends
    assert cache.row_floors == floors
    assert cache.minimum_reusable_offset == max(floors)


def test_the_storage_held_is_exposed() -> None:
    for offsets, name in (((3, 4), "dense"), ((BOUNDARY, 9), "packed")):
        _, cache = rows_at(*offsets)
        assert cache.composed.current is getattr(cache, name)
    _, cache = rows_at(3, BOUNDARY)
    assert cache.composed.current is cache


@pytest.mark.parametrize(
    ("window", "name"),
    [(None, "kv:delayed-quant:8:32:8:4"), (6, "kv:delayed-rotating-quant:6:8:32:8:4")],
)
def test_identity_names_all_that_changes_a_number(window: int | None, name: str) -> None:
    assert rows_at(2, window=window)[1].signature() == name


def test_only_rows_that_are_committed_and_end_at_the_boundary_are_packed() -> None:
    rows = Rows(delayed())
    cache = rows.cache
    assert isinstance(cache, DelayedRows)
    for row in (0, 1, 2):
        rows.join(row)
        rows._make_room(row, 0, BOUNDARY)
    tables = [rows.tables[row] for row in (0, 1, 2)]
    marks = mx.ones((3, BOUNDARY))

    def packed() -> list[bool]:
        [codes, *_] = cache.packed.planes
        return [bool(mx.any(codes[table[1].pages[0]] != 0)) for table in tables]

    cache.begin_prefill()
    ends = [BOUNDARY, BOUNDARY, BOUNDARY - 1]
    view = PrefillView(rows.subject.spec, [table[0] for table in tables], 0, ends)
    stand_in = cache.prefill(view)
    rows.subject.prefill(stand_in, marks)
    stand_in.finish()
    assert packed() == [False, False, False]
    cache.commit_prefill([1, 2])
    assert packed() == [False, True, False]
    cache.end_prefill()
    cache.commit_prefill([0])
    assert packed() == [False, True, False], "no forward is open"


def test_a_chunk_across_the_boundary_is_refused() -> None:
    rows = Rows(delayed())
    rows.join(0)
    table = rows.tables[0][0]
    table.grow(BOUNDARY)
    view = PrefillView(rows.subject.spec, [table], 0, [BOUNDARY])
    view.ends = (BOUNDARY + 1,)
    with pytest.raises(IndexError, match=f"ends at {BOUNDARY + 1}, past the boundary {BOUNDARY}"):
        rows.cache.prefill(view)


def test_a_round_ends_at_the_boundary_and_its_rows_are_packed_when_it_is_resolved() -> None:
    for keep, floor in ((2, BOUNDARY), (1, 0)):
        rows, cache = rows_at(BOUNDARY - 2)
        cache.spec_round_begin()
        rows.append()
        rows.append()
        assert not np.array(cache.packed.planes[0][1:]).any(), "nothing is packed in a round"
        with pytest.raises(IndexError, match=f"may not pass position {BOUNDARY}"):
            rows.append()
        cache.spec_round_rollback([keep])
        assert bool(np.array(cache.packed.planes[0][1:]).any()) == (keep == 2)
        assert cache.minimum_reusable_offset == floor
        rows.adopt_offsets()
        twin, _ = rows_at(BOUNDARY - 2 + keep)
        for _ in range(4):
            np.testing.assert_array_equal(rows.append()[0], twin.append()[0])


@pytest.mark.parametrize("window", [None, 6])
def test_a_packed_row_keeps_at_least_what_it_was_packed_at(window: int | None) -> None:
    rows, cache = rows_at(BOUNDARY + 3, window=window)
    assert not cache.is_trimmable()
    with pytest.raises(ValueError, match=f"was packed at {BOUNDARY}"):
        cache.trim(4, bypass=True)
    cache.trim(1 if window else 3, bypass=True)
    assert cache.row_offsets == (BOUNDARY + 2,) if window else (BOUNDARY,)
    rows.adopt_offsets()
    twin, _ = rows_at(rows.offsets[0], window=window)
    np.testing.assert_array_equal(rows.append()[0], twin.append()[0])
