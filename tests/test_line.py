"""Who is next, and at what cost."""

from collections.abc import Iterator

import pytest
from plain_line import PlainLine
from scheduling import World, make_config, make_tenant, submission

from mlxd.batching.fake_runner import FakeRunner, fake_memory
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
    looked: list[str] = []
    admission = world.scheduler._admission
    held_back = admission.held_back

    def look(tenant: Tenant, *args: object) -> str:
        looked.append(tenant.name)
        return held_back(tenant, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(admission, "held_back", look)
    world.scheduler.schedule(world.now, [])
    assert len(world.scheduler.book.queued) > NUM_TENANTS / 2
    assert len(looked) < 10


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
