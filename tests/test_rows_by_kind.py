"""Joins and leaves at chosen moments, each way to keep state: rows draw what they draw alone, bit for bit."""

from collections.abc import Sequence
from functools import cache

import pytest
from kind_rigs import BOUNDARY, KINDS, rig_of
from scheduling import World, make_config, submission
from tiny_models import WATCHED, pools_are_whole, prompt_of, seen

from mlxd.batching.driver import Driver
from mlxd.batching.plan import RowResult
from mlxd.batching.row import Row
from mlxd.scheduler.events import Tokens

NUM_TOKENS = 12


@cache
def alone(kind: str, length: int) -> list[object]:
    """What a row draws, with log-probabilities, and nobody beside it."""
    rig = rig_of(kind)
    rig.runner.reset()
    driver = rig.driver()
    row = driver.join(prompt_of(length), WATCHED)
    driver.prefill()
    results = [driver.decode()[0] for _ in range(NUM_TOKENS)]
    driver.leave(row)
    return seen(results)


class Party:
    """Rows of one kind that come and go, and what each of them drew."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        rig = rig_of(kind)
        rig.runner.reset()
        self.whole = rig.runner._whole
        self.driver = Driver(rig.runner, rig.memory)
        self.rows: list[Row] = []
        self._drawn: dict[int, list[RowResult]] = {}

    def join(self, *lengths: int) -> None:
        new = [self.driver.join(prompt_of(length), WATCHED) for length in lengths]
        self.rows += new
        self.driver.prefill(new)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for result in self.driver.decode():
                self._drawn.setdefault(result.row_id, []).append(result)

    def leave(self, *indexes: int) -> None:
        for index in indexes:
            self.driver.leave(self.rows[index])

    def end(self) -> None:
        """Everyone goes; what they drew is compared."""
        for row in list(self.driver.rows):
            self.driver.leave(row)
        assert pools_are_whole(self.driver)
        for row in self.rows:
            drawn = seen(self._drawn[row.row_id])
            assert drawn == alone(self._kind, len(row.prompt))[: len(drawn)], len(row.prompt)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("first", "steps", "joiners"),
    [
        pytest.param(7, 2, (1, 20, 34), id="at its second token"),
        pytest.param(20, 3, (5,), id="windows later"),
        pytest.param(BOUNDARY - 2, 2, (BOUNDARY - 1, 3), id="when it is packed"),
    ],
)
def test_rows_that_join_one_that_decodes_are_in_every_layer(
    kind: str, first: int, steps: int, joiners: Sequence[int]
) -> None:
    party = Party(kind)
    party.join(first)
    party.step(steps)
    party.join(*joiners)
    party.step()
    assert party.whole.row_offsets == (first + steps, *joiners), "one count for all layers"
    party.step(NUM_TOKENS - steps - 1)
    party.end()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(4, 5, 6), (3, 20, 9), (29, 31, 34)], ids=str)
@pytest.mark.parametrize(
    "leavers",
    [
        pytest.param((1,), id="the middle one"),
        pytest.param((2,), id="the last one"),
        pytest.param((0, 2), id="all but one"),
        pytest.param((0, 1, 2), id="all"),
    ],
)
def test_rows_that_stay_go_on_whoever_leaves_and_comes_back(
    kind: str, lengths: Sequence[int], leavers: Sequence[int]
) -> None:
    """Three steps bring the first lengths to a window not yet full, just full and past it."""
    party = Party(kind)
    party.join(*lengths)
    party.step(3)
    party.leave(*leavers)
    if len(leavers) < 3:
        party.step(4)
    party.join(lengths[leavers[0]], 6)
    party.step(5)
    party.end()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_may_end_in_the_step_in_which_another_joins(kind: str) -> None:
    """No token is lost or told twice, though the step after the last one was launched already."""
    rig = rig_of(kind)
    rig.runner.reset()
    world = World(make_config(max_rows=1), rig.runner)
    for number, length in enumerate((3, 20, 1, 34)):
        wanted = {"max_tokens": 4 + number, "temperature": 0.0, "ignore_eos": True}
        world.submit(submission(str(number), prompt_of(length), **wanted))
    world.run()
    for number, length in enumerate((3, 20, 1, 34)):
        events = [e for e in world.events if isinstance(e, Tokens) and e.key.request_id == str(number)]
        drawn = [token for event in events for token in event.token_ids]
        assert drawn == [token for token, *_ in alone(kind, length)][: 4 + number]  # type: ignore[misc]
