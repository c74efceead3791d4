import pytest
from scheduling import World, make_config, make_tenant, submission

from mlxd.batching.fake_runner import FakeRunner, fake_memory
from mlxd.scheduler.policy import FairPolicy, FcfsPolicy, Policy, make_policy
from mlxd.scheduler.tenant import Tenant


def tenant(name: str = "acme", *, weight: float = 1.0, service: float = 0.0) -> Tenant:
    return Tenant(name, weight, max_running=8, max_waiting=8, max_kv_bytes=1, service=service)


@pytest.mark.parametrize("kind", [FairPolicy, FcfsPolicy])
@pytest.mark.parametrize(
    ("weight", "prompt", "output", "service"),
    [(1, 10, 0, 10), (1, 0, 10, 20), (4, 100, 50, 50), (0.5, 1, 1, 6)],
)
def test_service_is_weighted_tokens_over_the_tenants_weight(
    kind: type[FairPolicy] | type[FcfsPolicy], weight: float, prompt: int, output: int, service: float
) -> None:
    served = tenant(weight=weight)
    kind(prompt_weight=1.0, output_weight=2.0, cached_weight=0.1).charge(served, prompt, output)
    assert served.service == service


def test_fair_ranks_the_least_served_first() -> None:
    policy = FairPolicy(1.0, 2.0, 0.1)
    tenants = [tenant("c", service=5), tenant("b", service=1), tenant("a", service=6)]
    assert [t.name for t in sorted(tenants, key=policy.rank)] == ["b", "c", "a"]


def test_of_tenants_that_were_served_as_much_the_one_with_fewer_rows_for_its_weight_is_next() -> None:
    policy = FairPolicy(1.0, 2.0, 0.1)
    tenants = [tenant(name, weight=weight, service=5) for name, weight in (("a", 1), ("b", 4), ("c", 1))]
    for each, num_running in zip(tenants, (1, 2, 0), strict=True):
        each.num_running = num_running
    assert [t.name for t in sorted(tenants, key=policy.rank)] == ["c", "b", "a"]


def test_fair_counts_prompt_tokens_that_rows_still_have_to_compute() -> None:
    policy = FairPolicy(1.0, 2.0, 0.1)
    admitted, other = tenant("a", service=0, weight=2), tenant("b", service=40)
    admitted.prefill_left = 100
    assert policy.rank(other) < policy.rank(admitted)
    assert admitted.service == 0


@pytest.mark.parametrize(
    ("own", "others", "lifted"),
    [(0.0, [7.0, 30.0], 7.0), (9.0, [7.0], 9.0), (0.0, [], 25.0), (60.0, [], 60.0)],
)
def test_a_tenant_that_returns_is_lifted_to_the_least_served_that_queues_or_the_last_that_entered(
    own: float, others: list[float], lifted: float
) -> None:
    policy = FairPolicy(1.0, 1.0, 0.1)
    gone = tenant("gone")
    policy.entered(gone)
    policy.charge(gone, 25, 0)
    back = tenant("back", service=own)
    policy.activate(back, [tenant(f"t{i}", service=s) for i, s in enumerate(others)])
    assert back.service == lifted


def test_who_entered_last_counts_with_the_prompts_its_rows_still_have_to_compute() -> None:
    policy = FairPolicy(1.0, 1.0, 0.1)
    alone, back = tenant("alone", service=5), tenant("back")
    alone.prefill_left = 100
    policy.entered(alone)
    policy.activate(back, [])
    assert back.service == 105


@pytest.mark.parametrize(("name", "kind"), [("fair", FairPolicy), ("fcfs", FcfsPolicy)])
def test_the_configuration_names_the_policy(name: str, kind: type[Policy]) -> None:
    assert isinstance(make_policy(make_config(policy=name).scheduler), kind)


def finish_order(world: World) -> list[str]:
    return [stats.tenant for stats in world.tape.requests]


def test_fcfs_serves_in_order_of_arrival_whatever_the_tenant() -> None:
    world = World(make_config(make_tenant("a"), make_tenant("b"), policy="fcfs", max_rows=1))
    for number, name in enumerate("aabab"):
        world.submit(submission(str(number), tenant=name))
    world.run()
    assert finish_order(world) == list("aabab")


def backlog(world: World, tenants: dict[str, int]) -> None:
    for name, count in tenants.items():
        for number in range(count):
            world.submit(submission(str(number), (1,) * 9, tenant=name, max_tokens=8))


def test_a_latecomer_is_served_next_though_another_queued_a_hundred() -> None:
    config = make_config(make_tenant("greedy", max_waiting=200), make_tenant("late"), max_rows=1)
    world = World(config)
    backlog(world, {"greedy": 100})
    for _ in range(25):
        world.turn()
    served_before = len(finish_order(world))
    backlog(world, {"late": 1})
    world.run()
    assert served_before > 0
    assert "late" in finish_order(world)[served_before : served_before + 2]


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (1.0, 8.0)])
def test_backlogged_tenants_are_served_by_weight_within_the_bound_of_the_paper(
    weights: tuple[float, float],
) -> None:
    """The gap between two backlogged counters stays within 2 max(w_p * prompt, w_q * tokens in the batch)."""
    config = make_config(
        make_tenant("a", weight=weights[0], max_waiting=600),
        make_tenant("b", weight=weights[1], max_waiting=600),
        max_rows=4,
    )
    world = World(config, FakeRunner(fake_memory(max_rows=4, max_model_len=64), prefill_s_per_token=1e-4))
    backlog(world, {"a": 500, "b": 500})
    a, b = world.scheduler.book
    bound = 2 * max(1.0 * 8, 2.0 * 4 * 8) / min(weights)
    for _ in range(600):
        world.turn()
        assert a.queue
        assert b.queue
        assert abs(a.service - b.service) <= bound
    work = {t.name: t.service * t.weight for t in (a, b)}
    assert work["a"] / work["b"] == pytest.approx(weights[0] / weights[1], rel=0.1)


def test_an_idle_tenant_leaves_its_share_to_others_and_earns_no_credit() -> None:
    config = make_config(
        make_tenant("busy", max_waiting=300), make_tenant("idle", max_waiting=300), max_rows=1
    )
    world = World(config)
    backlog(world, {"busy": 200})
    for _ in range(300):
        world.turn()
    before = len(finish_order(world))
    backlog(world, {"idle": 40})
    for _ in range(200):
        world.turn()
    served = finish_order(world)[before:]
    assert before > 20
    assert abs(served.count("idle") - served.count("busy")) <= 2


def test_fair_needs_hardly_more_steps_than_fcfs() -> None:
    turns = {}
    for policy in ("fcfs", "fair"):
        tenants = [make_tenant(name, max_waiting=300) for name in ("a", "b", "c")]
        world = World(make_config(*tenants, policy=policy, max_rows=8))
        backlog(world, {"a": 120, "b": 40, "c": 10})
        world.run()
        turns[policy] = world.now
    assert turns["fair"] <= 1.05 * turns["fcfs"]


def test_a_tenant_held_by_its_cap_earns_no_credit_and_gives_none_to_who_comes_later() -> None:
    names = ("a", "b", "late")
    tenants = [make_tenant(name, max_waiting=300) for name in names]
    capped = make_tenant("capped", max_waiting=300, tokens_per_minute=30)
    world = World(make_config(*tenants, capped, max_rows=2))
    backlog(world, {"a": 150, "b": 150, "capped": 30})
    for _ in range(150):
        world.turn()
    book = world.scheduler.book
    assert book["capped"].received < 0.5 * book["a"].received
    while not book["capped"].is_held:
        world.turn()
    backlog(world, {"late": 1})
    one_request = 2 * (9 + 2 * 8)
    assert book["late"].service >= min(book["a"].service, book["b"].service)
    while book["capped"].is_held:
        world.turn()
    assert book["capped"].service >= min(book["a"].service, book["b"].service) - one_request


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_where_prompts_take_all_the_time_chunks_go_to_who_is_behind(policy: str) -> None:
    """Long prompts, one token each: rows alone would share nothing, as both tenants always have some."""
    tenants = make_tenant("a", weight=8.0, max_waiting=300), make_tenant("b", max_waiting=300)
    memory = fake_memory(max_rows=4, max_model_len=256, chunk=16)
    world = World(make_config(*tenants, policy=policy, max_rows=4, prefill_ms=1), FakeRunner(memory))
    for name in "ab":
        for number in range(100):
            world.submit(submission(str(number), (number,) * 200, tenant=name, max_tokens=1))
    for _ in range(600):
        world.turn()
    a, b = world.scheduler.book
    share = a.received * a.weight / (a.received * a.weight + b.received * b.weight)
    assert (share == pytest.approx(8 / 9, abs=0.05)) == (policy == "fair")
