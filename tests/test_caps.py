"""What a tenant may have at most, and what it has in any case."""

from math import inf

import pytest
from scheduling import World, make_config, make_tenant, running, submission

from mlxd.batching.fake_runner import FakeRunner, fake_memory
from mlxd.caches.ledger import Reservation
from mlxd.scheduler.events import Accepted, Finished, Rejected
from mlxd.scheduler.quota import TokenBucket
from mlxd.scheduler.reserves import Reserves

PAGE = 16


def world_of(*tenants: object, pages: int = 8, **scheduler: object) -> World:
    memory = fake_memory(max_rows=8, max_model_len=256, chunk=16, page_size=PAGE, num_pages=pages)
    return World(make_config(*tenants, **scheduler), FakeRunner(memory))  # type: ignore[arg-type]


def bucket_after(used: int, *, held: int = 0) -> TokenBucket:
    """Of 600 tokens a minute, at time 0."""
    bucket = TokenBucket.full(600)
    bucket.hold(used + held)
    bucket.use(used, 0.0)
    return bucket


def test_a_bucket_fills_to_a_minutes_tokens_and_no_further() -> None:
    bucket = bucket_after(600)
    assert bucket.level_at(1.0) == 10.0
    assert bucket.level_at(1e6) == 600.0


@pytest.mark.parametrize(
    ("needed", "held", "ready"),
    [(10, 0, 0.0), (100, 0, 0.0), (110, 0, 1.0), (400, 0, 30.0), (100, 50, 5.0), (560, 50, inf)],
)
def test_a_bucket_says_when_it_will_have_enough_beside_what_is_held(
    needed: int, held: int, ready: float
) -> None:
    bucket = bucket_after(500, held=held)
    assert bucket.ready_at(needed, 0.0) == pytest.approx(ready)
    assert bucket.ready_at(needed, ready) == ready


def test_what_was_held_and_not_used_is_there_again() -> None:
    bucket = bucket_after(300, held=200)
    assert bucket.ready_at(300, 0.0) > 0
    bucket.release(200)
    assert bucket.ready_at(300, 0.0) == 0.0


def test_a_tenant_over_its_tokens_a_minute_waits_and_is_served_when_they_are_there() -> None:
    """Each request takes 10 tokens; a minute has 30 of them, half a token a second."""
    world = world_of(make_tenant("acme", tokens_per_minute=30))
    for number in range(5):
        world.submit(submission(str(number), (1,) * 6, max_tokens=4))
    world.run()
    entered = [stats.queue_s for stats in world.tape.requests]
    assert entered == [1.0, 1.0, 2.0, 21.0, 41.0]


def test_tokens_that_were_not_drawn_do_not_count_against_the_minute() -> None:
    world = world_of(make_tenant("acme", tokens_per_minute=60))
    world.submit(submission("long", (1,) * 6, max_tokens=50))
    for _ in range(4):
        world.turn()
    world.cancel(submission("long").key)
    world.submit(submission("next", (1,) * 6, max_tokens=40, at=world.now))
    world.turn()
    assert running(world) == ["next"]


def test_a_tenant_out_of_tokens_holds_nobody_else_up() -> None:
    world = world_of(make_tenant("a", tokens_per_minute=10), make_tenant("b"), policy="fcfs")
    for name in ("a", "a", "b"):
        world.submit(submission(f"{name}{len(world.events)}", (1,) * 6, tenant=name, max_tokens=4))
    world.turn()
    assert running(world) == ["a0", "b2"]


def test_a_request_above_a_minutes_tokens_is_refused_at_once() -> None:
    world = world_of(make_tenant("acme", tokens_per_minute=20))
    assert isinstance(world.submit(submission("fits", (1,) * 10, max_tokens=10)), Accepted)
    event = world.submit(submission("never", (1,) * 10, max_tokens=11))
    assert isinstance(event, Rejected)
    assert (event.reason, event.retryable) == ("quota", False)
    assert "10 prompt tokens + max_tokens 11 is above the 20 tokens a minute" in event.message


def test_a_preempted_row_takes_each_token_once() -> None:
    """Its prompt again would not fit the minute."""
    tenants = make_tenant("acme", tokens_per_minute=160), make_tenant("other")
    world = world_of(*tenants, pages=6, overcommit=4.0, slice_tokens=None)
    world.submit(submission("first", (1,) * 30, tenant="other", max_tokens=60))
    world.submit(submission("x", (1,) * 60, tenant="acme", max_tokens=30))
    world.run()
    assert any(step.preemptions for step in world.tape.steps)
    bucket = world.scheduler.book["acme"].bucket
    assert bucket is not None
    assert bucket.held == 0
    assert bucket.level_at(bucket.at) >= 160 - 90


def test_a_preempted_request_that_ends_with_tokens_in_flight_holds_nothing() -> None:
    tenants = make_tenant("a", tokens_per_minute=5000), make_tenant("b")
    world = world_of(*tenants, pages=100, max_rows=1, slice_tokens=4)
    world.submit(submission("long", tenant="a", max_tokens=200))
    for _ in range(4):
        world.turn()
    world.submit(submission("other", tenant="b"))
    while not any(request.num_preemptions for request in world.scheduler._open.values()):
        world.turn()
    world.cancel(submission("long").key._replace(tenant="a"))
    world.run()
    bucket = world.scheduler.book["a"].bucket
    assert bucket is not None
    assert bucket.held == 0


def test_what_a_tenant_reserves_is_out_of_others_reach() -> None:
    world = world_of(make_tenant("a"), make_tenant("b", kv_reserve=0.5))
    for number in range(4):
        world.submit(submission(f"a{number}", (1,) * 20, tenant="a", max_tokens=13))
    world.turn()
    assert running(world) == ["a0", "a1"]
    world.submit(submission("b", (1,) * 40, tenant="b", max_tokens=25))
    world.turn()
    assert running(world) == ["a0", "a1", "b"]


def test_a_request_inside_its_tenants_reserve_waits_for_no_larger_one() -> None:
    world = world_of(make_tenant("a"), make_tenant("b", kv_reserve=0.25), backfill_s=0, policy="fcfs")
    world.submit(submission("a0", (1,) * 20, tenant="a", max_tokens=13))
    world.submit(submission("large", (1,) * 60, tenant="a", max_tokens=37))
    world.submit(submission("b", (1,) * 20, tenant="b", max_tokens=13))
    world.turn()
    assert running(world) == ["a0", "b"]
    world.run()


def test_a_request_that_others_reserves_leave_no_room_for_is_refused() -> None:
    world = world_of(make_tenant("a"), make_tenant("b", kv_reserve=0.5))
    event = world.submit(submission("large", (1,) * 60, tenant="a", max_tokens=6))
    assert isinstance(event, Rejected)
    assert event.reason == "never_fits"
    assert "are kept for others" in event.message
    assert isinstance(world.submit(submission("own", (1,) * 60, tenant="b", max_tokens=6)), Accepted)


def test_a_reserve_keeps_what_its_tenant_does_not_use() -> None:
    reserves = Reserves({"a": 0.5, "b": 0.25, "c": 0.0}, (8, 4))
    assert reserves.kept_from("c") == (6, 3)
    reserves.promise("a", Reservation((3, 3)))
    assert reserves.kept_from("c") == (3, 1)
    assert reserves.kept_from("a") == (2, 1)
    assert reserves.covers("b", Reservation((2, 1)))
    assert not reserves.covers("b", Reservation((3, 1)))
    assert not reserves.covers("c", Reservation((1, 0)))
    reserves.release("a", Reservation((3, 3)))
    assert reserves.kept_from("c") == (6, 3)


def test_everything_ends_whatever_the_caps() -> None:
    tenants = [
        make_tenant("a", tokens_per_minute=120, max_running=2),
        make_tenant("b", kv_reserve=0.5, kv_share=0.75),
        make_tenant("c", max_prefilling=1),
    ]
    world = world_of(*tenants)
    for number in range(30):
        name = "abc"[number % 3]
        world.submit(submission(f"{name}{number}", (1,) * (5 + number), tenant=name, max_tokens=9))
    world.run()
    assert sum(isinstance(event, Finished) for event in world.events) == 30
    assert world.scheduler.book.reserves.kept_from("a") == (4,)
