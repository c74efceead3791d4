import pytest
from scheduling import World, make_config, make_tenant, running, submission

from mlxd.batching.fake_runner import FakeRunner, fake_memory
from mlxd.scheduler.events import Accepted, Rejected, RequestKey

PAGE = 16


def world_of(*tenants: object, pages: int = 8, max_rows: int = 8, **scheduler: object) -> World:
    """A pool of `pages` pages of 16 positions of 64 bytes."""
    memory = fake_memory(max_rows=8, max_model_len=256, chunk=16, page_size=PAGE, num_pages=pages)
    return World(make_config(*tenants, max_rows=max_rows, **scheduler), FakeRunner(memory))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "share", "message"),
    [
        (200, 57, 1.0, "200 prompt tokens + max_tokens 57 is above the context of 256 tokens"),
        (100, 30, 1.0, "may need 9216 bytes of KV; there are 8192"),
        (60, 30, 0.5, "may need 6144 bytes of KV; the tenant's share is 4096"),
        (100, 29, 1.0, ""),
        (40, 25, 0.5, ""),
    ],
)
def test_what_can_never_run_is_refused_at_once(
    num_prompt: int, max_tokens: int, share: float, message: str
) -> None:
    world = world_of(make_tenant("acme", kv_share=share))
    event = world.submit(submission("x", (1,) * num_prompt, max_tokens=max_tokens))
    if message:
        assert isinstance(event, Rejected)
        assert (event.reason, event.retryable, event.retry_after_ms) == ("never_fits", False, 0)
        assert message in event.message
        assert world.tape.rejects == [("acme", "never_fits")]
    else:
        assert isinstance(event, Accepted)
        world.run()


def test_the_request_after_a_refused_one_is_served() -> None:
    world = world_of()
    world.submit(submission("large", (1,) * 500))
    world.submit(submission("small"))
    world.run()
    assert [stats.outcome for stats in world.tape.requests] == ["length"]


@pytest.mark.parametrize(
    ("tenant_limit", "global_limit", "accepted", "message"),
    [
        (3, 99, 3, "tenant 'acme' has 3 waiting requests; the limit is 3"),
        (99, 2, 2, "the daemon's queue is full"),
    ],
)
def test_a_full_queue_refuses_and_says_when_to_come_back(
    tenant_limit: int, global_limit: int, accepted: int, message: str
) -> None:
    world = world_of(make_tenant("acme", max_waiting=tenant_limit), max_waiting=global_limit)
    events = [world.submit(submission(str(i))) for i in range(accepted + 1)]
    assert [type(event) for event in events[:-1]] == [Accepted] * accepted
    refused = events[-1]
    assert isinstance(refused, Rejected)
    assert (refused.reason, refused.retryable, refused.message) == ("queue_full", True, message)
    assert refused.retry_after_ms > 0


def test_retry_after_follows_the_pace_at_which_rows_leave() -> None:
    waits = []
    for seconds_a_turn in (0.001, 10.0):
        world = world_of(make_tenant("acme", max_waiting=4), max_rows=1)
        for number in range(40):
            world.submit(submission(str(number), max_tokens=1))
            world.now += seconds_a_turn - 1.0
            world.turn()
        events = [world.submit(submission(f"more {number}")) for number in range(9)]
        waits.append(next(event.retry_after_ms for event in events if isinstance(event, Rejected)))
    assert waits[0] < waits[1]
    assert all(50 <= wait <= 60_000 for wait in waits)


@pytest.mark.parametrize(
    ("capped", "fields"), [("rows", {"max_running": 1}), ("KV share", {"kv_share": 0.25})]
)
def test_a_tenant_at_its_own_cap_does_not_hold_up_others(capped: str, fields: dict[str, float]) -> None:
    world = world_of(make_tenant("a", **fields), make_tenant("b"), policy="fcfs")
    for name in ("a", "a", "b"):
        world.submit(submission(f"{name}{len(world.events)}", (1,) * 9, tenant=name, max_tokens=20))
    world.turn()
    assert running(world) == ["a0", "b2"], capped


@pytest.mark.parametrize(("max_rows", "max_batch", "rows"), [(3, 8, 3), (8, 2, 2), (8, 1, 1)])
def test_rows_are_capped_by_the_configuration_and_by_the_model(
    max_rows: int, max_batch: int, rows: int
) -> None:
    memory = fake_memory(max_rows=8)
    world = World(make_config(max_rows=max_rows), FakeRunner(memory, max_batch=max_batch))
    for number in range(6):
        world.submit(submission(str(number), (1,), max_tokens=50))
    for _ in range(6):
        world.turn()
    assert len(world.scheduler.batch) == rows


def test_a_preempted_request_waits_for_the_token_it_has_in_flight() -> None:
    world = world_of()
    world.submit(submission("x"))
    scheduler = world.scheduler
    [tenant] = scheduler.book
    tenant.head.num_inflight = 1
    assert scheduler._admission.pick([], room=100, now=0.0) is None
    tenant.head.num_inflight = 0
    assert scheduler._admission.pick([], room=100, now=0.0) is tenant.head


def test_a_row_that_is_cancelled_before_its_first_chunk_was_never_told_to_the_runner() -> None:
    world = world_of()
    for number in range(2):
        world.submit(submission(str(number), (1,) * 60))
    world.turn()
    never_planned = [r for r in world.scheduler.batch._running.values() if r.num_computed == 0]
    assert [request.key.request_id for request in never_planned] == ["1"]
    world.cancel(never_planned[0].key)
    world.run()


def test_within_a_tenant_nobody_overtakes() -> None:
    world = world_of()
    for name, size in (("first", 60), ("second", 100), ("third", 1)):
        world.submit(submission(name, (1,) * size, max_tokens=5))
    world.run()
    order = [e.key.request_id for e in world.events if isinstance(e, Accepted)]
    entered = [stats.queue_s for stats in world.tape.requests]
    assert order == ["first", "second", "third"]
    assert entered == sorted(entered)


@pytest.mark.parametrize("max_prefilling", [1, 2, 4])
def test_long_prompts_enter_few_at_a_time_so_that_another_tenant_may_still_come_between(
    max_prefilling: int,
) -> None:
    world = world_of(make_tenant("a", max_prefilling=max_prefilling), make_tenant("b"), pages=100)
    for number in range(6):
        world.submit(submission(f"a{number}", (1,) * 100, tenant="a"))
    world.turn()
    assert len(running(world)) == max_prefilling
    world.submit(submission("b", (1,) * 100, tenant="b"))
    world.turn()
    assert running(world)[-1] == "b"


def test_an_id_may_be_open_once_a_tenant_and_again_when_it_ended() -> None:
    world = world_of(make_tenant("a"), make_tenant("b"))
    world.submit(submission("same", tenant="a"))
    assert isinstance(world.submit(submission("same", tenant="b")), Accepted)
    conflict = world.submit(submission("same", tenant="a"))
    assert isinstance(conflict, Rejected)
    assert conflict.reason == "id_conflict"
    world.cancel(RequestKey("a", "same"))
    assert isinstance(world.submit(submission("same", tenant="a")), Accepted)
    world.run()


def test_draining_refuses_the_new_and_finishes_the_old() -> None:
    world = world_of(max_rows=1)
    world.submit(submission("running"))
    world.submit(submission("waiting"))
    world.turn()
    world.scheduler.is_draining = True
    refused = world.submit(submission("late"))
    assert isinstance(refused, Rejected)
    assert (refused.reason, refused.retryable) == ("draining", True)
    world.run()
    assert [stats.outcome for stats in world.tape.requests] == ["length", "length"]
