"""What servers of this kind were reported to get wrong with rows: each kind of fault, tried on whole rows."""

import random
from functools import cache
from itertools import permutations

import pytest
from scheduling import World, make_config, make_tenant, running, submission
from tiny_models import FAMILIES, make_rig, oracle, pools_are_whole, prompt_of

from mlxd.batching.driver import Driver
from mlxd.batching.row import Row
from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.events import Accepted, Rejected

MAX_ROWS = 8
NUM_JOINS = 1_000
MOST_TOKENS = 5
LENGTHS = (1, 7, 12)
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.4),
    SamplingParams(temperature=0.0, frequency_penalty=1.0, logit_bias={3: 50.0, 4: -50.0}),
    SamplingParams(temperature=0.8, top_k=5, top_p=0.9, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, top_logprobs=3),
)
WINDOWED = "gemma3_text"


def join(driver: Driver, length: int, sampling: int) -> Row:
    return driver.join(prompt_of(length), SAMPLINGS[sampling], seed=length)


@cache
def drawn_alone(length: int, sampling: int) -> list[int]:
    driver = make_rig("llama", max_rows=1).driver()
    row = join(driver, length, sampling)
    driver.prefill()
    for _ in range(MOST_TOKENS):
        driver.decode()
    return row.output


def test_a_thousand_random_joins_with_and_without_penalties_and_biases_draw_what_each_draws_alone() -> None:
    rng = random.Random(5)
    driver = make_rig("llama", "in_place", max_rows=MAX_ROWS).driver(pipelined=True)
    live: dict[int, tuple[Row, int, int, int]] = {}
    num_joined = 0
    while live or num_joined < NUM_JOINS:
        joiners = []
        while len(live) < MAX_ROWS and num_joined < NUM_JOINS:
            length, sampling = rng.choice(LENGTHS), rng.randrange(len(SAMPLINGS))
            row = join(driver, length, sampling)
            live[row.row_id] = row, length, sampling, rng.randint(1, MOST_TOKENS)
            joiners.append(row)
            num_joined += 1
        if joiners:
            driver.flush()
            driver.prefill(joiners)
        driver.decode()
        for row, length, sampling, wanted in list(live.values()):
            if len(row.output) >= wanted:
                driver.leave(row)
                del live[row.row_id]
                assert row.output[:wanted] == drawn_alone(length, sampling)[:wanted]
    driver.flush()
    assert pools_are_whole(driver)


def test_rows_around_a_window_may_join_in_every_order() -> None:
    window = FAMILIES[WINDOWED].window
    assert window is not None
    driver = make_rig(WINDOWED, max_rows=5).driver()
    for lengths in permutations((3, window - 1, window, window + 1, 3 * window)):
        rows = []
        for length in lengths:
            rows.append(driver.join(prompt_of(length)))
            driver.prefill(rows[-1:])
            driver.decode()
        for row in rows:
            driver.leave(row)
            expected = oracle(WINDOWED, tuple(row.prompt), len(lengths)).tokens
            assert tuple(row.output) == expected[: len(row.output)]
        assert pools_are_whole(driver)


@pytest.mark.parametrize("max_tokens", [4, 200])
def test_after_a_full_queue_has_ended_the_next_request_enters_at_once_and_nothing_is_promised(
    max_tokens: int,
) -> None:
    world = World(make_config(make_tenant("acme", max_waiting=3)))
    for turn in range(20):
        num_sent = 0
        while isinstance(world.submit(submission(f"{turn}.{num_sent}", max_tokens=max_tokens)), Accepted):
            num_sent += 1
            if num_sent % 3 == 0:
                world.turn()
        refused = world.events[-1]
        assert isinstance(refused, Rejected)
        assert (refused.reason, refused.retryable) == ("queue_full", True)
        world.run()
        assert world.scheduler.space.reserved_bytes == 0
        world.submit(submission(f"{turn}.next", max_tokens=1))
        world.turn()
        assert running(world) == [f"{turn}.next"]
        world.run()
