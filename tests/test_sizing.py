import itertools
from dataclasses import replace

import pytest

from mlxd.caches.page_pool import PagePool
from mlxd.caches.page_table import PageTable, page_tables
from mlxd.caches.sizing import GroupSpec, MemoryPlan, plan_memory


def spec(window: int | None, page_size: int = 16, bytes_per_token: int = 4) -> GroupSpec:
    name = "full" if window is None else f"sliding:{window}"
    return GroupSpec(name, (0,), window, page_size, bytes_per_token)


def most_pages_held(group: GroupSpec, num_tokens: int, chunk: int) -> int:
    """Grow a row as the scheduler does: chunks to the last position, then one position a step."""
    table = PageTable(group, PagePool(1000))
    ends = [*range(chunk, num_tokens - 1, chunk), num_tokens - 1, num_tokens]
    most = start = 0
    for end in ends:
        table.release_before(start)
        table.grow(end)
        most, start = max(most, len(table.pages)), end
    return most


@pytest.mark.parametrize("window", [None, 1, 5, 16, 17, 40])
@pytest.mark.parametrize("boundary", [16, 32, 64])
def test_a_row_that_changes_groups_holds_in_each_what_it_reserved(boundary: int, window: int | None) -> None:
    """Nothing of the second before the boundary, nothing of the first after it."""
    for page_size in (1, 4, 16):
        first = replace(spec(window, page_size), until=boundary, successor="second")
        second = replace(spec(window, page_size), name="second", since=boundary)
        for num_tokens in (1, 15, 16, 17, 33, 63, 64, 65, 100):
            for group in (first, second):
                held, reserved = most_pages_held(group, num_tokens, 16), group.pages_for(num_tokens, 16)
                assert held <= reserved, (group.name, page_size, num_tokens)
        tables = page_tables((first, second), (PagePool(1000), PagePool(1000)))
        for table in tables:
            table.grow(boundary - 1)
        assert [bool(table.pages) for table in tables] == [True, False]
        for table in tables:
            table.grow(boundary)
        oldest = 0 if window is None else max(0, boundary - window + 1) // page_size
        assert len(tables[1].pages) == boundary // page_size - oldest
        assert tables[1].end == (boundary if tables[1].pages else 0)
        tables[0].release_before(boundary)
        assert tables[0].pages == []
        tables[0].grow(boundary + 1)
        assert tables[0].pages == []


@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 16, 17, 40])
def test_no_row_ever_holds_more_pages_than_it_reserved(window: int | None) -> None:
    for page_size, chunk in itertools.product((1, 4, 5, 16), (4, 7, 16)):
        group = spec(window, page_size)
        for num_tokens in (1, 2, 5, 16, 17, 63, 100):
            held = most_pages_held(group, num_tokens, chunk)
            reserved = group.pages_for(num_tokens, chunk)
            assert held <= reserved, (page_size, chunk, num_tokens)
            if window is None:
                assert held == reserved


@pytest.mark.parametrize(
    ("window", "position", "page"),
    [(None, 999, 0), (16, 15, 0), (16, 30, 0), (16, 31, 1), (17, 31, 0), (1, 31, 1), (1, 32, 2)],
)
def test_first_live_page_holds_the_oldest_position_a_query_reads(
    window: int | None, position: int, page: int
) -> None:
    assert spec(window).first_live_page(position) == page


def plan(
    *specs: GroupSpec, budget: int, max_rows: int = 8, max_model_len: int = 1024, checkpoints: float = 0.0
) -> MemoryPlan:
    return plan_memory(
        specs,
        budget_bytes=budget,
        weights_bytes=0,
        max_rows=max_rows,
        max_model_len=max_model_len,
        chunk=64,
        checkpoints=checkpoints,
    )


@pytest.mark.parametrize("budget", [128, 1_000, 5_000, 20_000, 70_000, 10**9])
@pytest.mark.parametrize("specs", [(spec(None),), (spec(64),), (spec(None), spec(64)), (spec(32), spec(512))])
def test_pools_stay_inside_the_budget_and_none_is_empty(budget: int, specs: tuple[GroupSpec, ...]) -> None:
    memory = plan(*specs, budget=budget)
    assert 0 < memory.kv_bytes <= budget
    assert all(group.num_pages > 0 for group in memory.groups)


def test_a_large_budget_is_not_used_beyond_what_all_rows_need() -> None:
    memory = plan(spec(None), spec(64), budget=10**9)
    assert [group.num_pages for group in memory.groups] == [8 * 64, 8 * 9]


def test_rows_shorter_than_the_context_do_not_run_out_of_window_pages() -> None:
    """Two full-length rows fit; eight short ones need eight windows all the same."""
    memory = plan(spec(None), spec(64), budget=2 * (64 + 9) * 64)
    full, sliding = memory.groups
    assert sliding.num_pages == 8 * 9
    assert full.num_pages == 2 * (64 + 9) - 8 * 9


def test_checkpoints_are_spare_pages_of_bounded_groups_that_no_row_is_promised() -> None:
    specs, budget = (spec(None), spec(64)), 20 * (64 + 9) * 64
    plain, spared = plan(*specs, budget=budget), plan(*specs, budget=budget, checkpoints=0.25)
    assert [group.num_spare for group in plain.groups] == [0, 0]
    full, sliding = spared.groups
    assert full.num_spare == 0
    assert sliding.num_spare == 5 * (budget // 4 // (5 * 64))
    assert sliding.num_promised == plain.groups[1].num_pages
    assert spared.kv_bytes <= spared.budget_bytes == budget
    assert plan(spec(None), budget=budget, checkpoints=0.5) == plan(spec(None), budget=budget)


def test_dense_pages_of_rows_that_are_packed_later_are_no_checkpoints() -> None:
    """What a row leaves there stays under its keys, as in full attention."""
    dense = replace(spec(None), until=256, successor="packed")
    packed = replace(spec(None, bytes_per_token=1), name="packed", since=256)
    budget = 3 * (256 * 4 + 1024)
    assert plan(dense, packed, budget=budget, checkpoints=0.25) == plan(dense, packed, budget=budget)
    sliding = plan(replace(dense, window=64), packed, budget=budget, checkpoints=0.25)
    assert [group.num_spare > 0 for group in sliding.groups] == [True, False]


def test_a_budget_without_a_page_of_each_group_is_refused_with_both_figures() -> None:
    with pytest.raises(ValueError, match=r"127 bytes holds no page of each group \(128 bytes\)"):
        plan(spec(None), spec(64), budget=127)
