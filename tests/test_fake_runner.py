"""FakeRunner sees what a scheduler does wrong with rows and pages, so that simulations can fail."""

from collections.abc import Callable

import pytest

from mlxd.batching.fake_memory import fake_memory
from mlxd.batching.fake_runner import FakeRunner, fake_completion
from mlxd.batching.plan import DecodeEntry, PrefillChunk, StepPlan
from mlxd.batching.plan_rules import PlanError
from mlxd.batching.row import Row
from mlxd.batching.sampling_params import GREEDY
from mlxd.caches.page_pool import PagePool
from mlxd.caches.page_table import page_tables

PAGE = 4
PROMPT = (7, 1, 8, 2, 8, 1, 8, 2, 8)
NONE: tuple[tuple[int, ...], ...] = ((), ())


class Bench:
    """Rows of a full group and one of states, stepped by hand."""

    def __init__(self) -> None:
        memory = fake_memory(page_size=PAGE, chunk=PAGE, max_rows=4, max_model_len=32, has_state=True)
        self.runner = FakeRunner(memory)
        self.specs = [group.spec for group in memory.groups]
        self.pools = [PagePool(group.num_pages) for group in memory.groups]
        self.num_steps = 0

    def row(self, row_id: int, room: int = 16) -> Row:
        tables = page_tables(self.specs, self.pools)
        for table in tables:
            table.grow(room)
        return Row(row_id, GREEDY, 0, PROMPT, [], tables)

    def step(
        self, *parts: DecodeEntry | PrefillChunk, scrub: tuple[tuple[int, ...], ...] = NONE
    ) -> list[int]:
        """Launches and reads; the tokens drawn."""
        self.num_steps += 1
        decode = tuple(part for part in parts if isinstance(part, DecodeEntry))
        prefill = tuple(part for part in parts if isinstance(part, PrefillChunk))
        step = self.runner.launch(StepPlan(self.num_steps, decode, prefill, scrub))
        return [result.token for result in step.wait().rows]

    def prefilled(self, row_id: int) -> Row:
        """Eight positions computed."""
        row = self.row(row_id)
        self.step(chunk(row, 0))
        self.step(chunk(row, PAGE))
        return row


def chunk(row: Row, start: int) -> PrefillChunk:
    return PrefillChunk(row, start, start + PAGE, PROMPT[start : start + PAGE])


def first(row: Row) -> DecodeEntry:
    return DecodeEntry(row, 8, 0, PROMPT[8])


def test_a_row_draws_its_own_completion() -> None:
    bench = Bench()
    row = bench.prefilled(1)
    drawn = bench.step(first(row))
    drawn += bench.step(DecodeEntry(row, 9, 1, None))
    assert drawn == fake_completion(PROMPT, 0, 2, bench.runner.info.vocab_size)


def a_page_of_another(bench: Bench) -> None:
    one, other = bench.prefilled(1), bench.prefilled(2)
    one.tables[0].pages[1] = other.tables[0].pages[0]
    bench.step(first(one))


def a_slot_of_another(bench: Bench) -> None:
    one, other = bench.prefilled(1), bench.row(2)
    other.tables[1].pages[0] = one.tables[1].pages[0]
    bench.step(chunk(other, 0))


def a_page_that_was_not_zeroed(bench: Bench) -> None:
    bench.prefilled(1).tables[0].clear()
    other = bench.row(2)
    other.tables[0].pages[0] = 1
    bench.step(chunk(other, 0))


def a_page_that_was_zeroed_too_early(bench: Bench) -> None:
    row = bench.prefilled(1)
    bench.step(first(row), scrub=((row.tables[0].pages[0],), ()))


def no_room(bench: Bench) -> None:
    row = bench.row(1, room=PAGE)
    bench.step(chunk(row, 0))
    bench.step(chunk(row, PAGE))


def a_position_left_out(bench: Bench) -> None:
    bench.step(chunk(bench.row(1), PAGE))


def a_position_twice(bench: Bench) -> None:
    row = bench.prefilled(1)
    bench.step(chunk(row, PAGE))


def a_token_that_the_device_has(bench: Bench) -> None:
    row = bench.prefilled(1)
    [token] = bench.step(first(row))
    bench.step(DecodeEntry(row, 9, 1, token))


def a_chunk_after_a_token(bench: Bench) -> None:
    row = bench.prefilled(1)
    bench.step(first(row))
    bench.step(PrefillChunk(row, 9, 10, (0,)))


def a_row_twice(bench: Bench) -> None:
    row = bench.prefilled(1)
    bench.step(first(row), first(row))


def a_page_of_two_rows(bench: Bench) -> None:
    one, other = bench.row(1), bench.row(2)
    other.tables[0].pages[0] = one.tables[0].pages[0]
    bench.step(chunk(one, 0), chunk(other, 0))


def scratch(bench: Bench) -> None:
    row = bench.row(1)
    row.tables[0].pages[0] = 0
    bench.step(chunk(row, 0))


def a_copy_of_nothing(bench: Bench) -> None:
    bench.runner.launch(StepPlan(1, scrub=NONE, copies=(((3, 4),), ())))


def an_export_of_half_a_page(bench: Bench) -> None:
    row = bench.prefilled(1)
    bench.step(first(row))
    bench.runner.export_pages([(0, row.tables[0].pages[2])])


def a_third_step(bench: Bench) -> None:
    for step_id in (1, 2, 3):
        bench.runner.launch(StepPlan(step_id, scrub=NONE))


def a_later_step_first(bench: Bench) -> None:
    _, later = (bench.runner.launch(StepPlan(step_id, scrub=NONE)) for step_id in (1, 2))
    later.wait()


def a_step_after_the_end(bench: Bench) -> None:
    bench.runner.close()
    bench.step()


def a_stranger_that_leaves(bench: Bench) -> None:
    bench.runner.launch(StepPlan(1, scrub=NONE, left=(9,)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (a_page_of_another, "do not hold what it wrote"),
        (a_slot_of_another, "does not hold its state"),
        (a_page_that_was_not_zeroed, "was not scrubbed"),
        (a_page_that_was_zeroed_too_early, "do not hold what it wrote"),
        (no_room, r"not in pages 0\.\.4"),
        (a_position_left_out, "position 4 after 0"),
        (a_position_twice, "position 4 after 8"),
        (a_token_that_the_device_has, "on the device"),
        (a_chunk_after_a_token, "a chunk after a decode step"),
        (a_row_twice, "a row is in it twice"),
        (a_page_of_two_rows, "two rows hold, or scratch"),
        (scratch, "two rows hold, or scratch"),
        (a_copy_of_nothing, "an origin is empty"),
        (an_export_of_half_a_page, "is not full"),
        (a_third_step, r"launched with steps \[1, 2\] not read"),
        (a_later_step_first, "read out of order"),
        (a_step_after_the_end, "launch after close"),
        (a_stranger_that_leaves, "was in no step"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_plan_does_wrong_is_told(wrong: Callable[[Bench], None], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        wrong(Bench())
