"""Caps and reserves change while rows run."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from scheduling import World, make_config, make_tenant, running, submission

from mlxd.batching.fake_runner import FakeRunner, fake_memory
from mlxd.scheduler.config import TenantConfig
from mlxd.scheduler.events import Finished, Submission
from mlxd.scheduler.priority import Priority
from mlxd.scheduler.quota import TokenBucket

TWO_PAGES = {"prompt": (1,) * 20, "max_tokens": 13}


def world_of(*tenants: TenantConfig, **scheduler: object) -> World:
    """Eight pages of 16 positions; a prompt is computed 16 positions a step."""
    memory = fake_memory(max_rows=8, max_model_len=256, chunk=16, page_size=16, num_pages=8)
    return World(make_config(*tenants, **scheduler), FakeRunner(memory))


def submit(world: World, *items: Submission) -> None:
    for item in items:
        world.submit(replace(item, arrived_at=world.now))
    world.turn()


def reload(world: World, *tenants: TenantConfig) -> list[str]:
    """Ids of requests that end for it."""
    ended = world.scheduler.set_tenants(tenants, world.now)
    world.events += ended
    assert {event.outcome for event in finished(ended)} <= {"revoked"}
    return [event.key.request_id for event in ended]


def finished(events: Iterable[object]) -> list[Finished]:
    return [event for event in events if isinstance(event, Finished)]


def bucket_of(world: World, name: str) -> TokenBucket:
    bucket = world.scheduler.book[name].bucket
    assert bucket is not None
    return bucket


def test_a_new_reserve_takes_no_row_and_keeps_what_becomes_free() -> None:
    a, b = make_tenant("a", max_prefilling=8), make_tenant("b")
    world = world_of(a, b)
    submit(world, *(submission(f"a{n}", tenant="a", **TWO_PAGES) for n in range(3)))
    assert reload(world, a, make_tenant("b", kv_reserve=0.5)) == []
    submit(world, submission("a3", tenant="a", **TWO_PAGES), submission("b0", tenant="b", **TWO_PAGES))
    assert running(world) == ["a0", "a1", "a2", "b0"]
    world.cancel(submission("a0", tenant="a").key)
    world.turn()
    assert running(world) == ["a1", "a2", "b0"]
    assert reload(world, a, b) == []
    world.turn()
    assert running(world) == ["a1", "a2", "b0", "a3"]
    world.run()


@pytest.mark.parametrize(("before", "after", "kept"), [(0.0, 0.5, 2), (0.75, 0.5, 2), (0.5, 0.25, 0)])
def test_rows_of_a_reserves_tenant_count_against_the_new_one(before: float, after: float, kept: int) -> None:
    world = world_of(make_tenant("a"), make_tenant("b", kv_reserve=before))
    submit(world, submission("b0", tenant="b", **TWO_PAGES))
    reload(world, make_tenant("a"), make_tenant("b", kv_reserve=after))
    assert world.scheduler.book.reserves.kept_from("a") == (kept,)
    world.run()
    assert world.scheduler.book.reserves.kept_from("a") == (int(after * 8),)


def test_a_minutes_tokens_count_from_the_reload_on_with_what_rows_may_still_use() -> None:
    world = world_of(make_tenant("acme"))
    submit(world, submission("runs", (1,) * 6, max_tokens=50))
    world.turn()
    left = world.scheduler._open[submission("runs").key].quota
    assert reload(world, make_tenant("acme", tokens_per_minute=60)) == []
    assert (bucket_of(world, "acme").level, bucket_of(world, "acme").held) == (60, left)
    submit(world, submission("next", (1,) * 6, max_tokens=40))
    assert running(world) == ["runs"]
    reload(world, make_tenant("acme"))
    world.turn()
    assert running(world) == ["runs", "next"]
    world.run()


@pytest.mark.parametrize("per_minute", [600, 30, 10])
def test_another_rate_gives_no_used_token_back(per_minute: int) -> None:
    world = world_of(make_tenant("acme", tokens_per_minute=30))
    submit(world, submission("a", (1,) * 6, max_tokens=20))
    while world.scheduler.num_open:
        world.turn()
    before = bucket_of(world, "acme").level_at(world.now)
    assert 10 < before < 20
    reload(world, make_tenant("acme", tokens_per_minute=per_minute))
    bucket, level = bucket_of(world, "acme"), min(per_minute, before)
    assert bucket.level_at(world.now) == level
    assert bucket.level_at(world.now + 1.0) == min(per_minute, level + per_minute / 60)


def test_a_smaller_rate_holds_requests_back_until_rows_have_used_what_they_hold() -> None:
    world = world_of(make_tenant("acme", tokens_per_minute=100), max_rows=2)
    submit(world, submission("a", (1,) * 6, max_tokens=24), submission("b", (1,) * 6, max_tokens=24))
    assert reload(world, make_tenant("acme", tokens_per_minute=40)) == []
    assert bucket_of(world, "acme").held > 40
    submit(world, submission("c", (1,) * 6, max_tokens=24))
    world.run()
    assert [event.outcome for event in finished(world.events)] == ["length"] * 3
    assert bucket_of(world, "acme").held == 0
    assert world.tape.requests[-1].queue_s > 24


@pytest.mark.parametrize(
    ("caps", "message"),
    [
        ({"kv_share": 0.25}, "the tenant's share is"),
        ({"kv_share": 0.3, "kv_reserve": 0.25}, "the tenant's share is"),
        ({"tokens_per_minute": 40}, "is above the 40 tokens a minute"),
        ({"other": 0.75}, "are kept for others"),
    ],
)
@pytest.mark.parametrize("max_rows", [1, 3], ids=["waiting", "running"])
def test_requests_that_could_not_enter_any_more_end_and_others_go_on(
    max_rows: int, caps: dict[str, float], message: str
) -> None:
    world = world_of(make_tenant("a"), make_tenant("b"), max_rows=max_rows)
    small = submission("small", tenant="a", max_tokens=20)
    submit(world, small, submission("large", (1,) * 30, tenant="a", max_tokens=18))
    assert len(running(world)) == min(2, max_rows)
    own = {name: value for name, value in caps.items() if name != "other"}
    tenants = make_tenant("a", **own), make_tenant("b", kv_reserve=caps.get("other", 0.0))
    assert reload(world, *tenants) == ["large"]
    [event] = finished(world.events)
    assert message in event.error
    world.run()
    assert finished(world.events)[-1].outcome == "length"


def test_another_class_is_for_new_requests_and_those_that_were_let_in_keep_theirs() -> None:
    world = world_of(make_tenant("a", max_priority="interactive"), make_tenant("b"), max_rows=1)
    urgent = replace(submission("", tenant="a", max_tokens=20), priority=Priority.INTERACTIVE)

    def named(request_id: str) -> Submission:
        return replace(urgent, key=urgent.key._replace(request_id=request_id))

    submit(world, named("runs"), named("waits"))
    reload(world, make_tenant("a", max_priority="batch"), make_tenant("b"))
    submit(world, named("late"))
    classes = {key.request_id: request.priority for key, request in world.scheduler._open.items()}
    assert classes == {
        "runs": Priority.INTERACTIVE,
        "waits": Priority.INTERACTIVE,
        "late": Priority.BATCH,
    }
    world.run()


def test_more_rows_may_prefill_at_once_from_the_next_step_on() -> None:
    world = world_of(make_tenant("acme", max_prefilling=1))
    submit(world, *(submission(name, (1,) * 30, max_tokens=2) for name in "abc"))
    assert running(world) == ["a"]
    reload(world, make_tenant("acme", max_prefilling=3))
    world.turn()
    assert running(world) == ["a", "b", "c"]
    world.run()


def test_a_tenant_that_comes_back_starts_as_a_new_one() -> None:
    """Its queue's age, its minute, and its part in how evenly tenants are served."""
    a, b = make_tenant("a", tokens_per_minute=100), make_tenant("b")
    world = world_of(a, b, max_rows=1, ageing_s=2.0)
    items = [submission(str(n), tenant="ab"[n % 2], max_tokens=30) for n in range(6)]
    submit(world, *(replace(item, priority=Priority.NORMAL + (item.key.tenant == "a")) for item in items))
    for _ in range(10):
        world.turn()
        world.scheduler.fairness.stats(world.now)
    assert sorted(reload(world, b)) == ["0", "2", "4"]
    for _ in range(4):
        world.turn()
    reload(world, a, b)
    assert (world.scheduler.book["a"].received, bucket_of(world, "a").level) == (0.0, 100)
    submit(world, *(submission(f"again{n}", tenant="a", max_tokens=30) for n in range(2)))
    assert world.scheduler.fairness.stats(world.now).jain_index == 1.0
    world.run()
    assert bucket_of(world, "a").held == 0
