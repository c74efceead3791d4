"""Classes come before shares, and deadlines before arrival."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from scheduling import VOCAB, World, make_config, make_tenant, submission

from mlxd.batching.fake_runner import FakeRunner, fake_memory
from mlxd.batching.plan import PrefillChunk, StepPlan, StepResult
from mlxd.scheduler.events import Finished, Submission
from mlxd.scheduler.lane import Lane, TenantQueue
from mlxd.scheduler.priority import Priority

NORMAL, BATCH, INTERACTIVE = Priority.NORMAL, Priority.BATCH, Priority.INTERACTIVE


def world_of(*tenants: object, decode_s: float = 0.0, **scheduler: object) -> World:
    settings: dict[str, object] = {"max_rows": 1, "max_preemptions": 0} | scheduler
    memory = fake_memory(max_rows=8, max_model_len=256, chunk=16)
    runner = FakeRunner(memory, decode_s=decode_s, prefill_s_per_token=0.1)
    return World(make_config(*tenants, **settings), runner)  # type: ignore[arg-type]


def any_class(name: str, **fields: object) -> object:
    return make_tenant(name, max_priority="interactive", max_waiting=500, **fields)


def request(
    name: str,
    priority: Priority = NORMAL,
    *,
    tenant: str = "acme",
    at: float = 0.0,
    deadline: float | None = None,
    num_prompt: int = 3,
    **sampling: object,
) -> Submission:
    made = submission(name, (1,) * num_prompt, tenant=tenant, at=at, **sampling)
    return Submission(made.key, made.prompt, made.sampling, at, priority, deadline)


def entered(world: World) -> list[str]:
    """Requests that ended well, in the order in which they got a row."""
    return [e.key.request_id for e in world.events if isinstance(e, Finished) and e.outcome == "length"]


def outcomes(world: World) -> dict[str, str]:
    return {e.key.request_id: e.outcome for e in world.events if isinstance(e, Finished)}


def test_a_higher_class_goes_first_whatever_its_tenant_was_served() -> None:
    world = world_of(any_class("acme"), any_class("new"))
    world.scheduler.book["acme"].service = 1e6
    world.submit(request("batch", BATCH, tenant="new"))
    world.submit(request("normal", tenant="new"))
    world.submit(request("interactive", INTERACTIVE))
    world.run()
    assert entered(world) == ["interactive", "normal", "batch"]


@pytest.mark.parametrize(
    ("cap", "order"), [("normal", ["early", "late"]), ("interactive", ["late", "early"])]
)
def test_a_tenant_gets_no_higher_class_than_it_may_have(cap: str, order: list[str]) -> None:
    world = world_of(make_tenant("acme", max_priority=cap))
    world.submit(request("early"))
    world.submit(request("late", INTERACTIVE))
    world.run()
    assert entered(world) == order


def test_a_lower_class_gets_a_turn_once_its_time_in_the_queue_is_over() -> None:
    """A request takes about 5 seconds, so that some 4 of the higher class fit the 20."""
    world = world_of(any_class("acme"), any_class("low"), ageing_s=20)
    world.submit(request("low", NORMAL, tenant="low"))
    for number in range(30):
        world.submit(request(f"high {number}", INTERACTIVE))
    world.run()
    assert 3 <= entered(world).index("low") <= 7


def test_a_tenants_backlog_of_a_lower_class_rises_one_by_one() -> None:
    world = world_of(any_class("acme"), any_class("low"), ageing_s=20)
    for number in range(10):
        world.submit(request(f"low {number}", NORMAL, tenant="low"))
    for number in range(100):
        world.submit(request(f"high {number}", INTERACTIVE))
    for _ in range(200):
        world.turn()
    served = [name for name in entered(world) if name.startswith("low")]
    assert 5 <= len(served) <= 10
    assert served == [f"low {number}" for number in range(len(served))]


def test_waiting_alone_lifts_nobody_above_the_shares_of_its_own_class() -> None:
    """The flood waits for many times the ageing time; who comes later is still next."""
    world = world_of(any_class("acme"), any_class("late"), ageing_s=1)
    for number in range(50):
        world.submit(request(str(number)))
    for _ in range(60):
        world.turn()
    num_before = len(entered(world))
    world.submit(request("late", tenant="late", at=world.now))
    world.run()
    assert "late" in entered(world)[num_before : num_before + 2]


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_within_a_tenant_and_class_the_earliest_deadline_goes_first(policy: str) -> None:
    world = world_of(any_class("acme"), policy=policy)
    for name, deadline in (("none", None), ("late", 900.0), ("soon", 500.0), ("none too", None)):
        world.submit(request(name, deadline=deadline))
    world.run()
    assert entered(world) == ["soon", "late", "none", "none too"]


def test_a_request_ends_at_its_deadline_while_it_waits_and_while_it_runs() -> None:
    world = world_of(any_class("acme"))
    world.submit(request("running", deadline=20.0, max_tokens=100))
    world.submit(request("waiting", deadline=10.0 + 11.0, max_tokens=100))
    for _ in range(19):
        world.turn()
    assert outcomes(world) == {}
    world.turn()
    assert outcomes(world) == {"running": "expired"}
    world.run()
    ends = {e.key.request_id: e for e in world.events if isinstance(e, Finished)}
    assert (ends["waiting"].outcome, ends["waiting"].error_code) == ("expired", "expired")
    assert ends["running"].usage.completion_tokens > 10


def test_what_is_measured_to_end_too_late_ends_before_its_prefill() -> None:
    """A token of prefill takes 0.1 s: 101 of them do not fit 8 seconds, 11 do."""
    world = world_of(any_class("acme"))
    world.submit(request("measures", num_prompt=20))
    for _ in range(10):
        world.turn()
    assert world.is_idle
    num_plans = len(world.plans)
    world.submit(request("hopeless", num_prompt=101, at=10.0, deadline=18.0))
    world.turn()
    assert outcomes(world)["hopeless"] == "hopeless"
    assert len(world.plans) == num_plans
    world.submit(request("fits", num_prompt=11, at=11.0, deadline=18.0, max_tokens=2))
    world.run()
    assert outcomes(world)["fits"] == "length"


def test_what_is_kept_of_a_prompt_takes_no_time() -> None:
    """A token of prefill takes 0.1 s: 96 of them do not fit 4 seconds, but all of them are there already."""
    world = world_of(any_class("acme"), any_class("other"))
    world.submit(request("cold", num_prompt=97))
    world.run()
    for name, tenant in (("warm", "acme"), ("not its own", "other")):
        world.submit(
            request(name, tenant=tenant, at=world.now, deadline=world.now + 4.0, num_prompt=97, max_tokens=1)
        )
    world.run()
    assert outcomes(world) == {"cold": "length", "warm": "length", "not its own": "hopeless"}
    [end] = [e for e in world.events if isinstance(e, Finished) and e.outcome == "hopeless"]
    assert "it takes 9.6" in end.error


class Costly(FakeRunner):
    """A chunk takes what `chunk_s` says."""

    def __init__(self, chunk_s: Callable[[PrefillChunk], float]) -> None:
        super().__init__(fake_memory(max_rows=8, max_model_len=256, chunk=16))
        self._chunk_s = chunk_s

    def _wait(self, plan: StepPlan, result: StepResult) -> StepResult:
        return replace(super()._wait(plan, result), prefill_s=sum(map(self._chunk_s, plan.prefill)))


@pytest.mark.parametrize(
    ("chunk_s", "others"),
    [
        pytest.param(lambda chunk: 1.0, [2] * 20, id="short prompts, a forward each"),
        pytest.param(lambda chunk: 1.0 + chunk.start, [250], id="a long prompt, slower as it goes on"),
    ],
)
def test_what_others_prompts_took_makes_no_request_hopeless(
    chunk_s: Callable[[PrefillChunk], float], others: list[int]
) -> None:
    """A chunk of 16 from the beginning takes a second, and so does one of 1."""
    world = World(make_config(make_tenant("acme"), make_tenant("other"), max_rows=1), Costly(chunk_s))
    for number, num_prompt in enumerate(others):
        world.submit(request(str(number), num_prompt=num_prompt, max_tokens=1))
        world.run()
    fits = request("fits", tenant="other", num_prompt=33, at=world.now, deadline=world.now + 20, max_tokens=1)
    world.submit(fits)
    world.run()
    late = request("late", tenant="other", num_prompt=200, at=world.now, deadline=world.now + 9)
    world.submit(late)
    world.run()
    assert outcomes(world)["fits"] == "length"
    assert outcomes(world)["late"] == "hopeless"


@pytest.mark.parametrize(("stop", "outcome"), [((), "hopeless"), ((5,), "expired")])
def test_all_tokens_count_where_nothing_can_end_a_request_sooner(stop: tuple[int, ...], outcome: str) -> None:
    world = world_of(any_class("acme"), decode_s=1.0)
    world.submit(request("measures"))
    world.run()
    deadline = world.now + 20.0
    world.submit(request("x", at=world.now, deadline=deadline, max_tokens=60, stop_token_ids=stop))
    world.run()
    assert outcomes(world)["x"] == outcome


class TracingRunner(FakeRunner):
    """Its first decode step makes a graph, for a minute."""

    _is_traced = False

    def _wait(self, plan: StepPlan, result: StepResult) -> StepResult:
        result = super()._wait(plan, result)
        if self._is_traced or not plan.decode:
            return result
        self._is_traced = True
        return replace(result, decode_s=60.0, traced=True)


def test_a_step_that_made_a_graph_makes_nobody_hopeless() -> None:
    runner = TracingRunner(fake_memory(max_rows=8, max_model_len=256), vocab_size=VOCAB, decode_s=0.1)
    world = World(make_config(any_class("acme")), runner)  # type: ignore[arg-type]
    for name in ("traces", "x"):
        world.submit(request(name, at=world.now, deadline=world.now + 30.0, max_tokens=8))
        world.run()
    assert outcomes(world) == {"traces": "length", "x": "length"}


def test_a_request_without_a_measured_speed_is_given_a_chance() -> None:
    world = world_of(any_class("acme"))
    world.submit(request("x", num_prompt=200, deadline=30.0, max_tokens=2))
    world.run()
    assert outcomes(world) == {"x": "length"}


def test_a_lane_forgets_what_was_taken_out() -> None:
    world = world_of(any_class("acme"))
    lane = Lane()
    made = [world.scheduler._make_request(request(str(i), deadline=float(i))) for i in range(500)]
    for number, each in enumerate(made):
        each.number = number
    lane.add(made[0])
    for each in made[1:]:
        lane.add(each)
        lane.discard(each)
    assert len(lane) == 1
    assert lane.first is made[0]
    assert len(lane._heap) < 50


def test_a_queue_has_its_head_whatever_leaves() -> None:
    world = world_of(any_class("acme"))
    queue = TenantQueue()
    made = [world.scheduler._make_request(request(str(i), Priority(i % 3))) for i in range(9)]
    for number, each in enumerate(made):
        each.number = number
        queue.add(each)
    for expected in (0, 3, 6, 1, 4, 7, 2, 5, 8):
        assert queue.head is made[expected]
        assert made[expected] in queue
        queue.remove(made[expected])
    assert queue.head is None
    assert len(queue) == 0


def test_an_urgent_prompt_has_every_second_chunk_before_shorter_ones_of_lower_classes() -> None:
    world = world_of(any_class("acme"), any_class("urgent"), max_rows=8, prefill_ms=1)
    for number in range(2):
        world.submit(request(f"short {number}", num_prompt=120 + number, max_tokens=1))
    world.turn()
    world.submit(request("urgent", INTERACTIVE, tenant="urgent", num_prompt=129, max_tokens=1))
    before = len(world.plans)
    world.run()
    rows = [item[1] for plan in world.plans[before:] for item in plan if item[0] == "chunk"]
    urgent = max(rows)
    assert rows[:16].count(urgent) == rows.count(urgent) == 8
