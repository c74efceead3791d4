"""Who is next, and at what cost."""

from collections.abc import Iterator
from math import inf

import pytest
from plain_line import PlainLine
from scheduling import World, make_config, make_tenant, submission

from mlxd.batching.fake_runner import FakeRunner, fake_memory
from mlxd.scheduler.admission import MOST_PASSING
from mlxd.scheduler.events import Submission
from mlxd.scheduler.policy import FairPolicy
from mlxd.scheduler.priority import Priority
from mlxd.scheduler.tenant import Tenant
from mlxd.scheduler.tenants import TenantBook

NUM_TENANTS = 400


class CountingPolicy(FairPolicy):
    num_ranks = 0

    def rank(self, tenant: Tenant) -> tuple[float, ...]:
        self.num_ranks += 1
        return super().rank(tenant)


def crowd(max_rows: int = 2, **fields: object) -> World:
    """As many tenants as `NUM_TENANTS`, each with two requests that wait."""
    tenants = [make_tenant(f"t{i:03}", max_priority="interactive", **fields) for i in range(NUM_TENANTS)]
    memory = fake_memory(max_rows=max_rows, max_model_len=64)
    config = make_config(*tenants, max_rows=max_rows, max_waiting=10_000, ageing_s=10_000)
    world = World(config, FakeRunner(memory))
    for number in range(2):
        for index in range(NUM_TENANTS):
            made = submission(str(number), (1,) * (1 + index % 9), tenant=f"t{index:03}")
            priority = Priority(index % 3)
            world.submit(Submission(made.key, made.prompt, made.sampling, 0.0, priority))
    return world


def names(tenants: Iterator[Tenant]) -> list[str]:
    return [tenant.name for tenant in tenants]


def watch_looks(world: World, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of tenants, as it is asked what holds them back."""
    looked: list[str] = []
    admission = world.scheduler._admission
    held_back = admission.held_back

    def look(tenant: Tenant, *args: object) -> str:
        looked.append(tenant.name)
        return held_back(tenant, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(admission, "held_back", look)
    return looked


def plain(book: TenantBook) -> PlainLine:
    return PlainLine(book, FairPolicy(1.0, 2.0, 0.1))


def test_the_order_is_that_of_every_tenant_ranked_anew() -> None:
    world = crowd()
    book = world.scheduler.book
    for _ in range(200):
        world.turn()
        assert names(iter(book.line)) == names(iter(plain(book)))


def test_a_look_ranks_those_with_rows_and_those_to_whom_something_happened() -> None:
    world = crowd()
    policy = CountingPolicy(1.0, 2.0, 0.1)
    world.turn()
    line = world.scheduler.book.line
    line._policy = policy
    for _ in range(50):
        before = policy.num_ranks
        world.turn()
        assert policy.num_ranks - before <= 20
    assert policy.num_ranks > 0


def test_tenants_that_their_minute_holds_are_not_looked_at_before_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each may run one request of its two; the other waits for most of a minute."""
    world = crowd(tokens_per_minute=13)
    for _ in range(400):
        world.turn()
        if world.now > 30 and all(tenant.is_held for tenant in world.scheduler.book.queued.values()):
            break
    looked = watch_looks(world, monkeypatch)
    world.scheduler.schedule(world.now, [])
    assert len(world.scheduler.book.queued) > NUM_TENANTS / 2
    assert len(looked) < 10


def test_one_that_is_noted_again_and_again_while_it_is_held_leaves_little_behind() -> None:
    """And is looked at when its time comes all the same."""
    world = World(make_config(make_tenant("a", tokens_per_minute=13)))
    world.submit(submission("first", tenant="a", max_tokens=9))
    world.run()
    for number in range(200):
        made = submission(str(number), tenant="a", max_tokens=9)
        world.submit(made)
        world.scheduler.schedule(world.now, world.events)
        world.cancel(made.key)
    assert len(world.scheduler.book.line._alarms) < 40
    world.submit(submission("last", tenant="a", max_tokens=9))
    while world.scheduler.num_open:
        world.turn()
    assert 50 < world.now < 90


@pytest.mark.parametrize("backfill_s", [0.0, 1000.0])
@pytest.mark.parametrize(("kv_reserve", "most"), [(0.0, MOST_PASSING + 10), (1 / NUM_TENANTS, inf)])
def test_few_are_looked_at_to_pass_a_request_that_waits_for_pages(
    kv_reserve: float, most: float, backfill_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless pages are kept for some: whoever may enter on its own is never passed over."""
    memory = fake_memory(max_rows=8, max_model_len=64, num_pages=4)
    tenants = [make_tenant(f"t{i:03}", kv_reserve=kv_reserve) for i in range(NUM_TENANTS)]
    config = make_config(*tenants, max_waiting=10_000, backfill_s=backfill_s)
    world = World(config, FakeRunner(memory))
    for index in range(NUM_TENANTS):
        world.submit(submission("0", (1,) * 40, tenant=f"t{index:03}", max_tokens=20))
    for _ in range(3):
        world.turn()
    looked = watch_looks(world, monkeypatch)
    world.scheduler.schedule(world.now, [])
    assert world.scheduler._admission.reserving is not None
    assert 0 < len(looked) <= most
    assert (len(looked) >= NUM_TENANTS - 8) == (most == inf)


@pytest.mark.parametrize("level", list(Priority))
def test_rivals_hold_the_lowest_counter_of_a_class(level: Priority) -> None:
    world = crowd(max_rows=8)
    book = world.scheduler.book
    policy = FairPolicy(1.0, 2.0, 0.1)
    for _ in range(60):
        world.turn()
        for tenant in list(book)[:5]:
            found, every = book.line.rivals(tenant, level), plain(book).rivals(tenant, level)
            assert min(map(policy.counter, found)) == min(map(policy.counter, every))
