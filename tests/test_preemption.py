"""Who makes way for whom, and who may pass."""

from collections.abc import Callable

import pytest
from scheduling import VOCAB, World, make_config, make_tenant, running, submission

from mlxd.batching.fake_runner import FakeRunner, fake_completion, fake_memory
from mlxd.scheduler.events import Finished, Submission, Tokens
from mlxd.scheduler.preemption import LAST_TOKENS
from mlxd.scheduler.priority import Priority

SLICE = 10


def world_of(*tenants: object, pages: int | None = None, **scheduler: object) -> World:
    settings: dict[str, object] = {"max_rows": 2, "slice_tokens": SLICE} | scheduler
    names = tenants or [make_tenant(name, max_priority="interactive", max_waiting=200) for name in "ab"]
    memory = fake_memory(max_rows=8, max_model_len=256, chunk=16, num_pages=pages)
    runner = FakeRunner(memory, vocab_size=VOCAB)
    return World(make_config(*names, **settings), runner)  # type: ignore[arg-type]


def request(
    name: str,
    tenant: str = "a",
    priority: Priority = Priority.NORMAL,
    num_prompt: int = 3,
    max_tokens: int = 60,
) -> Submission:
    made = submission(name, (1,) * num_prompt, tenant=tenant, max_tokens=max_tokens)
    return Submission(made.key, made.prompt, made.sampling, 0.0, priority)


def turns(world: World, count: int) -> None:
    for _ in range(count):
        world.turn()


def preempted(world: World) -> dict[str, int]:
    found: dict[str, int] = {}
    for step in world.tape.steps:
        for reason, count in step.preemptions.items():
            found[reason] = found.get(reason, 0) + count
    return found


def check_texts(world: World) -> None:
    """Each request that ended has the tokens of a run alone."""
    for end in (e for e in world.events if isinstance(e, Finished)):
        tokens = [t for e in world.events if isinstance(e, Tokens) and e.key == end.key for t in e.token_ids]
        num_prompt = end.usage.prompt_tokens
        assert tokens == fake_completion((1,) * num_prompt, 7, len(tokens), VOCAB)
        assert end.outcome == "length"


def test_a_row_that_had_its_slice_makes_way_for_a_tenant_that_is_behind() -> None:
    world = world_of()
    for name in ("a0", "a1"):
        world.submit(request(name, "a", max_tokens=200))
    turns(world, 3)
    world.submit(request("b0", "b"))
    turns(world, 2)
    assert running(world) == ["a0", "a1"]
    turns(world, SLICE + 8)
    assert "b0" in running(world)
    world.run()
    assert preempted(world)["slice"] >= 1
    check_texts(world)


@pytest.mark.parametrize("changed", [{"slice_tokens": None}, {"policy": "fcfs"}, {"max_preemptions": 0}])
def test_slices_can_be_off(changed: dict[str, object]) -> None:
    world = world_of(**changed)
    for name in ("a0", "a1"):
        world.submit(request(name, "a", max_tokens=200))
    world.submit(request("b0", "b"))
    world.run()
    assert preempted(world) == {}


def test_no_row_makes_way_within_its_tenant_or_for_one_that_was_served_as_much() -> None:
    world = world_of()
    for name in ("a0", "a1", "a2"):
        world.submit(request(name, "a", max_tokens=200))
    turns(world, 40)
    world.scheduler.book["b"].service = world.scheduler.book["a"].service
    world.submit(request("b0", "b"))
    turns(world, 5)
    assert running(world) == ["a0", "a1"]


@pytest.mark.parametrize("limit", [1, 2])
def test_a_request_is_preempted_a_bounded_number_of_times(limit: int) -> None:
    world = world_of(max_preemptions=limit, max_rows=1, slice_tokens=2)
    for name in "ab":
        for number in range(4):
            world.submit(request(f"{name}{number}", name, max_tokens=230))
    seen: dict[str, int] = {}
    while not world.is_idle:
        world.turn()
        for each in world.scheduler._open.values():
            seen[each.key.request_id] = each.num_preemptions
    assert max(seen.values()) == limit
    check_texts(world)


def test_a_row_keeps_its_last_tokens() -> None:
    world = world_of(max_rows=1)
    world.submit(request("a0", "a", max_tokens=SLICE + LAST_TOKENS))
    turns(world, 4)
    world.submit(request("b0", "b", Priority.NORMAL))
    world.run()
    assert preempted(world) == {}


def test_a_higher_class_takes_the_row_of_the_lowest_one() -> None:
    world = world_of()
    world.submit(request("batch", "a", Priority.BATCH, max_tokens=100))
    world.submit(request("normal", "a", max_tokens=100))
    turns(world, 3)
    world.submit(request("urgent", "b", Priority.INTERACTIVE))
    turns(world, 1)
    assert running(world) == ["normal", "urgent"]
    world.run()
    assert preempted(world) == {"priority": 1}
    check_texts(world)


def test_a_higher_class_takes_as_many_rows_as_it_needs_pages_for_or_none() -> None:
    """Pages of 16: the large one needs 8 of 10, each small one 5."""
    for max_tokens, taken in ((60, ["large"]), (SLICE, ["small 0", "small 1"])):
        world = world_of(pages=10, max_rows=8)
        for number in range(2):
            world.submit(request(f"small {number}", "a", Priority.BATCH, 80 - max_tokens, max_tokens))
        turns(world, 3)
        world.submit(request("large", "b", Priority.INTERACTIVE, num_prompt=100, max_tokens=28))
        turns(world, 2)
        assert running(world) == taken
        world.run()
        check_texts(world)


def test_a_request_that_ageing_raised_takes_nobodys_row() -> None:
    world = world_of(max_rows=1, ageing_s=5, slice_tokens=None)
    world.submit(request("running", "a", Priority.NORMAL, max_tokens=60))
    turns(world, 2)
    world.submit(request("aged", "b", Priority.BATCH))
    world.submit(request("behind", "a", Priority.NORMAL))
    turns(world, 40)
    assert running(world) == ["running"]
    world.run()
    assert preempted(world) == {}


def enter_beside_a_large_one(change: Callable[[], Submission], **scheduler: object) -> list[str]:
    """Ten pages; one row holds 5 for 40 more steps, a large request waits for 8;
    who runs once `change` came."""
    world = world_of(pages=10, max_rows=8, policy="fcfs", **scheduler)
    world.submit(request("holder", "a", num_prompt=40, max_tokens=40))
    turns(world, 4)
    world.submit(request("large", "b", num_prompt=100, max_tokens=28))
    world.submit(change())
    turns(world, 1)
    found = running(world)
    world.run()
    check_texts(world)
    return found


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "enters"),
    [(40, 20, True), (20, 30, True), (20, 50, False), (2, 31, True), (2, 44, False), (2, 15, True)],
)
def test_others_pass_a_request_that_waits_for_pages_only_where_they_do_not_put_it_off(
    num_prompt: int, max_tokens: int, enters: bool
) -> None:
    """Beside the large one two pages are left over: who needs more must end before the holder."""
    found = enter_beside_a_large_one(lambda: request("small", "a", Priority.NORMAL, num_prompt, max_tokens))
    assert ("small" in found) is enters


def test_what_fits_beside_a_request_that_waits_may_stay_longer() -> None:
    found = enter_beside_a_large_one(lambda: request("small", "a", Priority.NORMAL, 2, 31))
    assert "small" in found


def test_a_lower_class_may_pass_as_it_makes_way() -> None:
    def lower() -> Submission:
        return request("small", "a", Priority.BATCH, 20, 50)

    assert "small" in enter_beside_a_large_one(lower)
    assert "small" not in enter_beside_a_large_one(lower, max_preemptions=0)


def test_after_its_time_nobody_passes_any_more() -> None:
    world = world_of(pages=10, max_rows=8, policy="fcfs", backfill_s=10)
    world.submit(request("holder", "a", num_prompt=40, max_tokens=40))
    turns(world, 4)
    world.submit(request("large", "b", num_prompt=100, max_tokens=28))
    entered_at = {}
    for number in range(20):
        world.submit(request(f"s{number}", "a", num_prompt=2, max_tokens=1))
        turns(world, 1)
        entered_at |= {name: world.now for name in running(world) if name not in entered_at}
    passing = [at for name, at in entered_at.items() if name.startswith("s")]
    assert len(passing) > 5
    assert max(passing) <= 4 + 1 + 10
    world.run()
    check_texts(world)


def test_a_request_that_waited_for_pages_is_held_no_more_when_it_ends() -> None:
    world = world_of(pages=10, max_rows=8, policy="fcfs")
    world.submit(request("holder", num_prompt=40, max_tokens=40))
    turns(world, 4)
    large = request("large", "b", num_prompt=100, max_tokens=28)
    world.submit(large)
    turns(world, 1)
    admission = world.scheduler._admission
    assert admission.reserving is not None
    world.cancel(large.key)
    world.run()
    assert admission.reserving is None
