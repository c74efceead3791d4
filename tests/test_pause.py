"""Requests that lose their rows because their own clients read too little."""

import random
from dataclasses import replace

import pytest
from pausing import PAGE, check_text, pause, request, tokens, turns, unpause, world_of
from scheduling import make_tenant, running

from mlxd.scheduler.events import Accepted, Rejected, RequestKey
from mlxd.scheduler.priority import Priority
from mlxd.scheduler.request import RequestState


@pytest.mark.parametrize("num_turns", [1, 2, 3, 5, 20])
def test_its_row_and_its_promise_go_to_others_and_its_text_is_that_of_a_run_alone(num_turns: int) -> None:
    """Six pages: one request needs four, so no two of them run together."""
    world = world_of(pages=6, max_rows=8)
    slow, other = request("slow", num_prompt=20), request("other", "b", num_prompt=20)
    world.submit(slow)
    world.submit(other)
    turns(world, num_turns)
    assert running(world) == ["slow"]
    paused = pause(world, "slow")
    assert (paused.state, paused.row) == (RequestState.PAUSED, None)
    assert world.scheduler.space.reserved_bytes == 0
    world.turn()
    assert running(world) == ["other"]
    turns(world, 60)
    check_text(world, other)
    assert (world.scheduler.num_open, len(world.scheduler.paused), world.scheduler.num_waiting) == (1, 1, 0)
    assert len(tokens(world, "slow")) <= num_turns
    unpause(world, "slow")
    world.run()
    check_text(world, slow)


def test_it_is_told_as_a_preemption_of_its_own_kind_and_counts_as_none() -> None:
    world = world_of(max_preemptions=1)
    world.submit(request("slow"))
    for _ in range(3):
        turns(world, 4)
        paused = pause(world, "slow")
        turns(world, 3)
        unpause(world, "slow")
    assert paused.num_preemptions == 0
    world.run()
    found = [step.preemptions for step in world.tape.steps if step.preemptions]
    assert found == [{"credit": 1}] * 3
    assert world.scheduler.fairness.preemptions == {"credit": 3}


def test_no_gap_between_its_tokens_and_no_wait_for_its_row_is_told_of_the_pause() -> None:
    world = world_of()
    world.submit(request("slow"))
    turns(world, 4)
    pause(world, "slow")
    turns(world, 100)
    unpause(world, "slow")
    world.run()
    assert max(gap for step in world.tape.steps for gap in step.token_gaps_s) <= 2
    [stats] = world.tape.requests
    assert stats.queue_s is not None
    assert stats.queue_s <= 1


def test_it_waits_at_the_place_of_its_arrival() -> None:
    world = world_of()
    for name in ("slow", "second", "third"):
        world.submit(request(name))
    turns(world, 4)
    pause(world, "slow")
    turns(world, 4)
    assert running(world) == ["second"]
    unpause(world, "slow")
    while "second" in running(world):
        world.turn()
    world.turn()
    assert running(world) == ["slow"]
    world.run()


@pytest.mark.parametrize("priority", list(Priority))
def test_one_that_waits_may_be_paused_and_is_out_of_its_queue(priority: Priority) -> None:
    """A preempted one, too: tokens of its row may be on their way still."""
    world = world_of(ageing_s=3.0, max_preemptions=9)
    world.submit(request("first"))
    world.submit(replace(request("slow"), priority=priority))
    turns(world, 2)
    for name in ("slow", "first"):
        pause(world, name)
    turns(world, 50)
    assert not world.scheduler.book.queued
    assert world.scheduler.book.waiting == [0] * len(Priority)
    for name in ("slow", "first"):
        unpause(world, name)
    world.run()
    for name in ("first", "slow"):
        check_text(world, request(name))


@pytest.mark.parametrize("num_turns", range(1, 8))
def test_tokens_in_flight_come_and_may_end_it(num_turns: int) -> None:
    world = world_of()
    made = request("slow", max_tokens=4)
    world.submit(made)
    turns(world, num_turns)
    if world.scheduler.num_open:
        pause(world, "slow")
        turns(world, 4)
    assert (len(world.scheduler.paused) == 1) == (num_turns < 5)
    unpause(world, "slow")
    world.run()
    assert len(world.scheduler.paused) == 0
    check_text(world, made)


def test_one_that_comes_back_with_a_token_in_flight_does_not_hold_up_its_tenant() -> None:
    """It waits for that token outside the queue; paused again meanwhile, it stays."""
    world = world_of(max_rows=2)
    for name in ("slow", "first"):
        world.submit(request(name))
    turns(world, 4)
    world.submit(request("second"))
    paused = pause(world, "slow")
    unpause(world, "slow")
    assert paused.num_inflight > 0
    world.turn()
    assert running(world) == ["first", "second"]
    pause(world, "slow")
    turns(world, 60)
    assert paused.state is RequestState.PAUSED
    unpause(world, "slow")
    world.run()
    check_text(world, request("slow"))


def test_one_that_ends_as_it_comes_back_is_held_no_more() -> None:
    """With a token in flight, and no other request that would have steps planned."""
    world = world_of()
    world.submit(request("slow"))
    turns(world, 4)
    paused = pause(world, "slow")
    unpause(world, "slow")
    assert paused.num_inflight > 0
    world.cancel(paused.key)
    world.turn()
    assert world.is_idle
    assert not world.scheduler.paused._returning


def test_an_unknown_key_and_what_is_so_already_are_nothing() -> None:
    world = world_of()
    world.submit(request("slow"))
    turns(world, 3)
    unpause(world, "slow")
    assert running(world) == ["slow"]
    world.scheduler.paused.pause(RequestKey("a", "none"))
    world.scheduler.paused.unpause(RequestKey("b", "slow"))
    for _ in range(2):
        pause(world, "slow")
    assert len(world.scheduler.paused) == 1
    unpause(world, "slow")
    world.run()
    world.scheduler.paused.pause(RequestKey("a", "slow"))
    assert len(world.scheduler.paused) == 0


def test_it_takes_a_place_of_its_own_tenants_and_of_nobody_elses() -> None:
    world = world_of(make_tenant("a", max_waiting=2), make_tenant("b", max_waiting=2), max_waiting=2)
    for name in ("slow 0", "slow 1"):
        world.submit(request(name))
        turns(world, 3)
        pause(world, name)
    answers = [world.submit(request(f"{n}", tenant)) for n, tenant in enumerate("abbb")]
    assert [type(answer) for answer in answers] == [Rejected, Accepted, Accepted, Rejected]
    assert answers[0].message == "tenant 'a' has 2 waiting requests, 2 of them paused; the limit is 2"  # type: ignore[union-attr]
    unpause(world, "slow 0")
    assert isinstance(world.submit(request("more")), Rejected)
    unpause(world, "slow 1")
    world.run()


def test_nothing_is_planned_for_paused_requests_and_only_a_command_wakes_them() -> None:
    world = world_of()
    world.submit(request("slow"))
    turns(world, 3)
    pause(world, "slow")
    turns(world, 5)
    steps = world.scheduler.num_steps
    assert world.scheduler.wakes_at(world.now) == float("inf")
    turns(world, 5)
    assert world.scheduler.num_steps == steps
    world.submit(replace(request("late"), deadline=1000.0))
    pause(world, "late")
    assert world.scheduler.wakes_at(world.now) == 1000.0


@pytest.mark.parametrize("reuse", [True, False])
def test_what_is_computed_again_is_charged_and_brings_no_credit(reuse: bool) -> None:
    """Positions that the prefix cache has kept are charged as found ones are."""
    world = world_of(pages=6, prompt_weight=1.0, output_weight=2.0, cached_weight=0.25)
    world.submit(request("slow", num_prompt=40))
    turns(world, 8)
    pause(world, "slow")
    turns(world, 2)
    if not reuse:
        world.submit(request("other", "b", num_prompt=80, max_tokens=10))
        turns(world, 40)
    tenant = world.scheduler.book["a"]
    num_known, before = 40 + len(tokens(world, "slow")), tenant.received
    num_kept = (num_known - 1) // PAGE * PAGE if reuse else 0
    unpause(world, "slow")
    world.turn()
    world.run()
    to_come = 2.0 * (80 - num_known)
    assert tenant.received - before == to_come + 0.25 * num_kept + (num_known - 1 - num_kept)


def test_a_tenant_whose_requests_were_all_paused_is_lifted_like_one_that_was_idle() -> None:
    world = world_of()
    world.submit(request("slow"))
    turns(world, 3)
    pause(world, "slow")
    for number in range(6):
        world.submit(request(f"{number}", "b"))
    turns(world, 120)
    book = world.scheduler.book
    assert book["a"].service < book["b"].service
    before = book["b"].service
    unpause(world, "slow")
    world.turn()
    assert before <= book["a"].service
    world.run()


@pytest.mark.parametrize("seed", range(60))
def test_random_pauses_change_no_text_end_everything_once_and_leave_nothing(seed: int) -> None:
    """Rows, pages, classes, slices and overcommitted pages among them."""
    rng = random.Random(seed)
    tenants = [
        make_tenant(name, max_priority="interactive", tokens_per_minute=rng.choice([None, 3000]))
        for name in "abc"
    ]
    world = world_of(
        *tenants,
        pages=rng.choice([10, 40]),
        max_rows=rng.choice([1, 3, 8]),
        slice_tokens=rng.choice([None, 4]),
        max_preemptions=rng.choice([0, 2]),
        overcommit=rng.choice([1.0, 3.0]),
    )
    made = [
        replace(
            request(str(number), rng.choice("abc"), rng.randrange(1, 60), rng.randrange(1, 60)),
            priority=rng.choice(list(Priority)),
        )
        for number in range(14)
    ]
    to_come = list(made)
    for _ in range(150):
        if to_come and rng.random() < 0.3:
            world.submit(to_come.pop())
        each = rng.choice(made).key
        if rng.random() < 0.4:
            world.scheduler.paused.pause(each)
        else:
            world.scheduler.paused.unpause(rng.choice(made).key)
        world.turn()
    for each in to_come:
        world.submit(each)
    for each in made:
        world.scheduler.paused.unpause(each.key)
    world.run()
    for each in made:
        check_text(world, each)
    assert len(world.scheduler.paused) == 0
    assert all(tenant.bucket is None or tenant.bucket.held == 0 for tenant in world.scheduler.book)
