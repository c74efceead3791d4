"""What is told about fairness."""

import pytest
from scheduling import World, make_config, make_tenant, submission

from mlxd.metrics.stats import FairnessStats
from mlxd.scheduler.fairness import WINDOW, jain_index


@pytest.mark.parametrize(
    ("values", "index"),
    [([], 1.0), ([5.0], 1.0), ([2.0, 2.0, 2.0], 1.0), ([1.0, 0.0, 0.0, 0.0], 0.25), ([0.0, 0.0], 1.0)],
)
def test_jains_index(values: list[float], index: float) -> None:
    assert jain_index(values) == pytest.approx(index)


def backlogged(policy: str, **fields: object) -> World:
    tenants = [make_tenant(name, max_waiting=500, **fields) for name in "ab"]
    world = World(make_config(*tenants, policy=policy, max_rows=2))
    for name in "ab":
        for number in range(60):
            world.submit(submission(f"{number}", (1,) * 5, tenant=name, max_tokens=10))
    return world


@pytest.mark.parametrize(("policy", "low", "high"), [("fair", 0.99, 1.0), ("fcfs", 0.5, 0.55)])
def test_the_index_compares_those_who_waited_all_of_the_window(policy: str, low: float, high: float) -> None:
    """Under fcfs the tenant that came first gets all."""
    world = backlogged(policy)
    for _ in range(WINDOW):
        world.turn()
        stats = world.scheduler.fairness.stats(world.now)
    assert low <= stats.jain_index <= high
    assert (stats.service_gap > 200) == (policy == "fcfs")


def test_it_is_sampled_once_a_second_and_forgotten_when_nobody_waits() -> None:
    world = backlogged("fcfs")
    world.turn()
    meter = world.scheduler.fairness
    first = meter.stats(world.now)
    world.scheduler.book["a"].service += 1000
    assert meter.stats(world.now + 0.9) == first
    assert meter.stats(world.now + 1.0).service_gap > first.service_gap + 500
    world.run()
    assert meter.stats(world.now) == FairnessStats()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "rows"),
        ({"max_running": 1}, "max_running"),
        ({"tokens_per_minute": 20}, "tokens_per_minute"),
        ({"kv_share": 0.01}, "kv_share"),
    ],
)
def test_waiting_requests_are_counted_by_what_they_lack(fields: dict[str, object], reason: str) -> None:
    world = World(make_config(make_tenant("a", **fields), max_rows=8 if fields else 2))
    for number in range(6):
        world.submit(submission(str(number), (1,) * 5, tenant="a", max_tokens=10))
    world.turn()
    waits = world.scheduler.fairness.stats(world.now).waits
    assert list(waits) == [reason]
    assert waits[reason] == world.scheduler.num_waiting


def test_deadlines_and_preemptions_are_counted() -> None:
    world = World(make_config(make_tenant("a"), make_tenant("b"), max_rows=1, slice_tokens=4))
    world.submit(submission("long", tenant="a", max_tokens=200))
    for _ in range(3):
        world.turn()
    world.submit(submission("other", tenant="b", max_tokens=20))
    world.run()
    stats = world.scheduler.fairness.stats(world.now)
    assert stats.preemptions == {"slice": 1}
