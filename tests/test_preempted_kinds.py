"""Rows with every kind of state that made way, for whatever reason, go on as if nothing had been."""

import pytest
from kind_runners import KINDS, runner_of
from msgspec.structs import replace
from scheduling import World, make_config, make_tenant, submission
from tiny_models import prompt_of

from mlxd.scheduler.config import CacheConfig
from mlxd.scheduler.events import RequestKey, Submission, Tokens
from mlxd.scheduler.priority import Priority

NUM_ROWS, MAX_TOKENS = 2, 48


def draw(
    kind: str, priority: Priority | None, *, reuse: bool, pauses: bool = False
) -> tuple[World, list[list[int]]]:
    """Tokens of two greedy requests; with `priority`, another tenant's come later and go before them.

    With `pauses` their clients stop reading in turn.
    """
    runner_of(kind).reset()
    tenants = [make_tenant(name, max_priority="interactive") for name in "ab"]
    config = replace(
        make_config(*tenants, max_rows=NUM_ROWS, slice_tokens=4, max_preemptions=3),
        cache=CacheConfig(prefix=reuse),
    )
    world = World(config, runner_of(kind))
    for number in range(NUM_ROWS):
        prompt = prompt_of(21 + 9 * number)
        world.submit(submission(f"a{number}", prompt, tenant="a", max_tokens=MAX_TOKENS, temperature=0.0))
    for number in range(6):
        key = RequestKey("a", f"a{number % NUM_ROWS}")
        for _ in range(4):
            world.turn()
        if pauses:
            world.scheduler.paused.pause(key)
        for _ in range(5):
            world.turn()
        world.scheduler.paused.unpause(key)
        if priority is not None:
            made = submission(
                f"b{number}", prompt_of(9, seed=number), tenant="b", max_tokens=7, temperature=0.0
            )
            world.submit(Submission(made.key, made.prompt, made.sampling, world.now, priority))
    world.run()
    told = [e for e in world.events if isinstance(e, Tokens)]
    return world, [
        [token for event in told if event.key.request_id == f"a{number}" for token in event.token_ids]
        for number in range(NUM_ROWS)
    ]


@pytest.mark.parametrize(
    ("priority", "reason", "reuse"),
    [(Priority.INTERACTIVE, "priority", False), (Priority.NORMAL, "slice", True)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_made_way_draws_what_it_draws_undisturbed(
    kind: str, priority: Priority, reason: str, reuse: bool
) -> None:
    _, undisturbed = draw(kind, None, reuse=reuse)
    world, disturbed = draw(kind, priority, reuse=reuse)
    assert sum(step.preemptions.get(reason, 0) for step in world.tape.steps) > 0
    assert [len(tokens) for tokens in undisturbed] == [MAX_TOKENS] * NUM_ROWS
    assert disturbed == undisturbed


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_whose_client_stopped_reading_draws_what_it_draws_undisturbed(kind: str, reuse: bool) -> None:
    _, undisturbed = draw(kind, None, reuse=reuse)
    world, disturbed = draw(kind, None, reuse=reuse, pauses=True)
    assert sum(step.preemptions.get("credit", 0) for step in world.tape.steps) > 4
    assert [len(tokens) for tokens in undisturbed] == [MAX_TOKENS] * NUM_ROWS
    assert disturbed == undisturbed
