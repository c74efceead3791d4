"""What ends a paused request, and what does not."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from pausing import check_text, outcome, pause, request, turns, unpause, world_of
from scheduling import World, make_tenant

from mlxd.scheduler.events import RequestKey


def revoke(world: World) -> None:
    world.events += world.scheduler.set_tenants((make_tenant("b"),), world.now)


def reload_with_less(world: World) -> None:
    tenants = make_tenant("a", tokens_per_minute=10), make_tenant("b")
    world.events += world.scheduler.set_tenants(tenants, world.now)


ENDS: dict[str, tuple[Callable[[World], object], str]] = {
    "cancel": (lambda world: world.cancel(RequestKey("a", "slow")), "cancelled"),
    "client gone": (lambda world: world.cancel(RequestKey("a", "slow"), "client_gone"), "client_gone"),
    "slow client": (lambda world: world.cancel(RequestKey("a", "slow"), "slow_client"), "slow_client"),
    "tenant gone": (revoke, "revoked"),
    "smaller cap": (reload_with_less, "revoked"),
    "deadline": (lambda world: turns(world, 50), "expired"),
}


@pytest.mark.parametrize("case", ENDS)
@pytest.mark.parametrize("num_turns", [2, 5])
def test_whatever_ends_a_request_ends_a_paused_one(case: str, num_turns: int) -> None:
    end, expected = ENDS[case]
    world = world_of(make_tenant("a", tokens_per_minute=5000), make_tenant("b"))
    world.submit(replace(request("slow"), deadline=50.0))
    turns(world, num_turns)
    pause(world, "slow")
    end(world)
    assert outcome(world, "slow") == expected
    world.run()
    assert len(world.scheduler.paused) == 0
    if expected != "revoked":
        bucket = world.scheduler.book["a"].bucket
        assert bucket is not None
        assert bucket.held == 0
    assert [stats.outcome for stats in world.tape.requests] == [expected]


@pytest.mark.parametrize("how", ["stop", "failure"])
def test_the_end_of_the_engine_ends_a_paused_one(how: str) -> None:
    world = world_of()
    world.submit(request("slow"))
    turns(world, 3)
    pause(world, "slow")
    if how == "stop":
        world.events += world.scheduler.end_all("draining", "draining", "", world.now)
    else:
        world.events += world.scheduler.abandon("engine_failed", "", world.now)
    assert outcome(world, "slow") == ("draining" if how == "stop" else "failed")
    assert world.scheduler.num_open == 0


def test_a_reload_that_keeps_its_tenant_keeps_it_paused() -> None:
    world = world_of(make_tenant("a", tokens_per_minute=5000))
    world.submit(request("slow"))
    turns(world, 4)
    pause(world, "slow")
    world.events += world.scheduler.set_tenants((make_tenant("a", tokens_per_minute=4000),), world.now)
    assert world.scheduler.book["a"].num_paused == 1
    unpause(world, "slow")
    world.run()
    check_text(world, request("slow"))
