"""Rows that join and leave at any step: each draws what it draws alone, and siblings feel nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import Rig, edge_lengths, make_rig, oracle, pools_are_whole, prompt_of, stored_bytes

from mlxd.batching.driver import Driver
from mlxd.batching.plan import StepPlan
from mlxd.batching.row import Row
from mlxd.batching.runner import PendingStep
from mlxd.batching.sampling_params import GREEDY, SamplingParams

MAX_ROWS = 4
LONGEST_RUN = 32
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, repetition_penalty=1.2)

Action = tuple[str, int]
# ("join", prompt index), ("leave", row index), ("decode", steps); indexes wrap around what there is.
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(0, 7)),
        st.tuples(st.just("leave"), st.integers(0, MAX_ROWS - 1)),
        st.tuples(st.just("decode"), st.integers(1, 6)),
    ),
    min_size=8,
    max_size=24,
)

_worlds: dict[tuple[str, str, bool], Driver] = {}


def world_of(family: str, attention: str, pipelined: bool) -> Driver:
    """One for all examples: each inherits the pages that the ones before it left behind."""
    key = family, attention, pipelined
    if key not in _worlds:
        rig = make_rig(family, attention, max_rows=MAX_ROWS, max_model_len=64)
        _worlds[key] = rig.driver(pipelined=pipelined)
    return _worlds[key]


def run_actions(family: str, driver: Driver, actions: Sequence[Action]) -> None:
    lengths = edge_lengths(family)
    rows: list[Row] = []
    for action, number in actions:
        if action == "join" and len(driver.rows) < MAX_ROWS:
            rows.append(driver.join(prompt_of(lengths[number % len(lengths)]), GREEDY))
            driver.prefill(rows[-1:])
        elif action == "leave" and driver.rows:
            driver.leave(driver.rows[number % len(driver.rows)])
        elif action == "decode":
            for _ in range(number):
                driver.decode()
        for row in [row for row in driver.rows if len(row.output) > LONGEST_RUN - 8]:
            driver.leave(row)
    driver.flush()
    for row in list(driver.rows):
        driver.leave(row)
    for row in rows:
        expected = oracle(family, tuple(row.prompt), LONGEST_RUN).tokens
        assert tuple(row.output) == expected[: len(row.output)]
    assert pools_are_whole(driver)


@pytest.mark.parametrize("pipelined", [False, True], ids=["waited", "pipelined"])
@pytest.mark.parametrize("attention", ["gathered", "in_place"])
@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(actions=ACTIONS)
def test_any_order_of_joins_and_leaves_draws_what_rows_draw_alone(
    attention: str, pipelined: bool, actions: list[Action]
) -> None:
    run_actions("gemma3_text", world_of("gemma3_text", attention, pipelined), actions)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("attention", ["gathered", "in_place"])
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(actions=ACTIONS)
def test_any_order_in_each_kind_of_model(attention: str, family: str, actions: list[Action]) -> None:
    run_actions(family, world_of(family, attention, True), actions)


class NotingDriver(Driver):
    """Notes the ends of the prefill chunks it launches, by row."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig.runner, rig.memory)
        self.chunk_ends: dict[int, list[int]] = {}

    def _launch(self, plan: StepPlan) -> PendingStep:
        for chunk in plan.prefill:
            self.chunk_ends.setdefault(chunk.row.row_id, []).append(chunk.end)
        return super()._launch(plan)


@dataclass(slots=True)
class Siblings:
    """What three rows saw: tokens, chunk ends, and by step the pages they hold and the bytes in them."""

    tokens: list[list[int]] = field(default_factory=list)
    chunk_ends: list[list[int]] = field(default_factory=list)
    shapes: list[list[tuple[int, int]]] = field(default_factory=list)
    stored: list[list[bytes]] = field(default_factory=list)


def live_with(rig: Rig, sampling: SamplingParams, *, visited: bool) -> Siblings:
    """Two rows decode and a third prefills while a visitor joins, decodes and leaves; 18 steps in all."""
    seen, driver = Siblings(), NotingDriver(rig)
    rows = [driver.join(prompt_of(length, seed=1), sampling, seed=length) for length in (30, 7)]
    driver.prefill()
    lived = 0

    def live(steps: int) -> None:
        nonlocal lived
        for _ in range(steps):
            driver.decode()
            lived += 1
            seen.shapes.append([(table.first_page, len(table.pages)) for row in rows for table in row.tables])
            seen.stored.append(
                [stored_bytes(rig, row, len(row.prompt) + len(row.output) - 1) for row in rows]
            )

    live(6)
    before = [list(table.pages) for row in rows for table in row.tables]
    joiners = []
    if visited:
        joiners.append(driver.join(prompt_of(8, seed=2), SamplingParams(temperature=2.0), seed=9))
    joiners.append(driver.join(prompt_of(21, seed=1), sampling, seed=21))
    driver.prefill(joiners)
    rows.append(joiners[-1])
    assert [list(table.pages) for row in rows[:2] for table in row.tables] == before
    live(6)
    if visited:
        before = [list(table.pages) for row in rows for table in row.tables]
        driver.leave(joiners[0])
        assert [list(table.pages) for row in rows for table in row.tables] == before
    live(6)
    seen.tokens = [row.output for row in rows]
    seen.chunk_ends = [driver.chunk_ends[row.row_id] for row in rows]
    for row in rows:
        driver.leave(row)
    assert pools_are_whole(driver)
    return seen


@pytest.mark.parametrize("attention", ["gathered", "in_place"])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_join_or_a_leave_touches_no_sibling(sampling: SamplingParams, attention: str) -> None:
    """Tokens, chunk ends, pages held and every stored byte are those of a run without the visitor."""
    rig = make_rig("gemma3_text", attention, max_rows=MAX_ROWS)

    assert live_with(rig, sampling, visited=True) == live_with(rig, sampling, visited=False)


def test_seeded_rows_differ_by_seed_alone() -> None:
    rig = make_rig("llama", max_rows=MAX_ROWS)
    driver = rig.driver()
    rows = [driver.join(prompt_of(9), SEEDED, seed=seed) for seed in (3, 3, 4)]
    driver.prefill()
    for _ in range(12):
        driver.decode()

    assert rows[0].output == rows[1].output
    assert rows[0].output != rows[2].output
