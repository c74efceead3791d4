"""How many rows run at once."""

from dataclasses import replace

import pytest

from mlxd.caches.capacity import Capacity, capacities, cost_of_packing, rows_at_once
from mlxd.caches.sizing import GroupSpec, MemoryPlan, plan_memory

FULL = GroupSpec("full", (0,), None, 16, 4)
SLIDING = GroupSpec("sliding:64", (1,), 64, 16, 4)


def delayed(boundary: int) -> tuple[GroupSpec, GroupSpec]:
    """Rows of 4 bytes a position that take one byte once they are packed."""
    dense = replace(FULL, name="dense", until=boundary, successor="packed")
    return dense, replace(FULL, name="packed", since=boundary, bytes_per_token=1)


def plan(*specs: GroupSpec, budget: int, max_rows: int = 32) -> MemoryPlan:
    return plan_memory(
        specs, budget_bytes=budget, weights_bytes=0, max_rows=max_rows, max_model_len=1024, chunk=16
    )


@pytest.mark.parametrize(
    ("memory", "num_tokens", "rows"),
    [
        (plan(FULL, budget=3 * 4096), 1024, 3),
        (plan(FULL, budget=3 * 4096), 512, 6),
        (plan(FULL, budget=3 * 4096), 513, 5),
        (plan(FULL, budget=4095), 1024, 0),
        (plan(FULL, budget=10**6, max_rows=4), 16, 4),
        (plan(SLIDING, budget=10**6, max_rows=4), 1024, 4),
        (plan(FULL, SLIDING, budget=3 * (4096 + 384)), 1024, 1),
    ],
    ids=[
        "full length",
        "half of it",
        "a page more",
        "none",
        "as many as may",
        "windows",
        "the scarcer group",
    ],
)
def test_as_many_run_as_the_scarcest_group_holds(memory: MemoryPlan, num_tokens: int, rows: int) -> None:
    assert rows_at_once(memory, num_tokens) == rows


@pytest.mark.parametrize(
    ("boundary", "expected", "is_less"),
    [
        (64, (Capacity(1024, 32, 10), Capacity(64, 32, 32)), [False, False]),
        (512, (Capacity(1024, 13, 10), Capacity(512, 13, 20)), [False, True]),
        (1008, (Capacity(1024, 8, 10), Capacity(1008, 8, 10)), [True, True]),
    ],
)
def test_packing_on_the_way_is_compared_with_none_at_both_lengths(
    boundary: int, expected: tuple[Capacity, ...], is_less: list[bool]
) -> None:
    found = capacities(plan(*delayed(boundary), budget=40960), 0.1)
    assert found == expected
    assert [capacity.is_less for capacity in found] == is_less
    assert (cost_of_packing(found) is not None) is any(is_less)


def test_where_nothing_is_packed_on_its_way_there_is_nothing_to_compare() -> None:
    found = capacities(plan(FULL, budget=40960), 0.1)
    assert found == (Capacity(1024, 10),)
    assert str(found[0]) == "10 of 1024 positions"
    assert cost_of_packing(found) is None


def test_the_warning_names_lengths_and_both_counts() -> None:
    found = [Capacity(1024, 9, 10), Capacity(512, 30, 20)]
    assert cost_of_packing(found) == (
        "packing on the way serves fewer rows at once than no packing: 9 of 1024 positions (dense 10)"
    )
