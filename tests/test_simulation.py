"""Whatever tenants do, nothing leaks, everyone ends once, and no request sees its siblings."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import VOCAB, World, make_config, make_tenant

from mlxd.batching.fake_runner import FakeRunner, fake_completion, fake_memory
from mlxd.batching.sampling_params import SamplingParams
from mlxd.caches.sizing import MemoryPlan
from mlxd.scheduler.events import Accepted, Finished, Rejected, RequestKey, Submission, Tokens
from mlxd.scheduler.priority import Priority

TENANTS = (
    make_tenant("acme", weight=3.0, max_running=4, max_waiting=6, max_priority="interactive"),
    make_tenant("beta", weight=1.0, kv_share=0.6, max_waiting=6, tokens_per_minute=600),
    make_tenant("corp", weight=0.5, max_running=1, max_waiting=6, max_priority="interactive"),
)


@dataclass(frozen=True)
class Arrival:
    turn: int
    tenant: str
    num_prompt: int
    max_tokens: int
    seed: int
    stop_token: int | None
    cancel_after: int | None
    priority: Priority = Priority.NORMAL


arrivals = st.lists(
    st.builds(
        Arrival,
        turn=st.integers(0, 40),
        tenant=st.sampled_from([tenant.name for tenant in TENANTS]),
        num_prompt=st.integers(1, 70),
        max_tokens=st.integers(1, 40),
        seed=st.integers(0, 3),
        stop_token=st.none() | st.integers(0, 9),
        cancel_after=st.none() | st.integers(0, 30),
        priority=st.sampled_from(Priority),
    ),
    min_size=1,
    max_size=16,
)


def small_memory(num_pages: int, window: int | None = None) -> MemoryPlan:
    """The sliding group is as tight as the full one."""
    sizes = {"max_rows": 5, "max_model_len": 100, "chunk": 16, "page_size": 8}
    return fake_memory(**sizes, num_pages=num_pages, window=window, num_window_pages=max(1, num_pages // 2))


def prompt_of(arrival: Arrival, index: int) -> tuple[int, ...]:
    return tuple((index * 31 + p * 7) % 10 for p in range(arrival.num_prompt))


def simulate(
    trace: list[Arrival],
    memory: MemoryPlan,
    *,
    policy: str,
    overcommit: float,
    slice_tokens: int | None = 4,
) -> World:
    """Submit and cancel by the trace, then run until idle."""
    settings = {"policy": policy, "overcommit": overcommit, "slice_tokens": slice_tokens, "ageing_s": 20}
    config = make_config(*TENANTS, max_rows=5, **settings)
    runner = FakeRunner(memory, vocab_size=10, prefill_s_per_token=0.01)
    world = World(config, runner)
    ordered = sorted(enumerate(trace), key=lambda item: item[1].turn)
    ends = [(a.turn + a.cancel_after, i) for i, a in ordered if a.cancel_after is not None]
    for turn in range(75):
        for index, a in ordered:
            if a.turn == turn:
                stops = () if a.stop_token is None else (a.stop_token,)
                sampling = SamplingParams(max_tokens=a.max_tokens, seed=a.seed, stop_token_ids=stops)
                key = RequestKey(a.tenant, str(index))
                world.submit(Submission(key, prompt_of(a, index), sampling, world.now, a.priority))
        for at, index in ends:
            if at == turn:
                world.cancel(RequestKey(trace[index].tenant, str(index)))
        if not world.is_idle:
            world.turn()
    world.run()
    return world


def expected_tokens(arrival: Arrival, index: int) -> list[int]:
    tokens = fake_completion(prompt_of(arrival, index), arrival.seed, arrival.max_tokens, 10)
    if arrival.stop_token in tokens:
        return tokens[: tokens.index(arrival.stop_token) + 1]
    return tokens


def check_outcomes(world: World, trace: list[Arrival]) -> None:
    opened = {e.key for e in world.events if isinstance(e, Accepted)}
    refused = {e.key for e in world.events if isinstance(e, Rejected)}
    ends = Counter(e.key for e in world.events if isinstance(e, Finished))
    tokens: dict[RequestKey, list[int]] = defaultdict(list)
    for event in world.events:
        if isinstance(event, Tokens):
            tokens[event.key] += event.token_ids
    assert not opened & refused
    assert len(opened | refused) == len(trace)
    assert ends == Counter(opened)
    for event in world.events:
        if not isinstance(event, Finished):
            continue
        index = int(event.key.request_id)
        expected = expected_tokens(trace[index], index)
        assert event.usage.completion_tokens == len(tokens[event.key])
        if event.outcome == "cancelled":
            assert tokens[event.key] == expected[: len(tokens[event.key])]
        else:
            assert event.outcome == ("stop" if expected[-1] == trace[index].stop_token else "length")
            assert tokens[event.key] == expected


@settings(max_examples=120, deadline=None)
@given(
    trace=arrivals,
    num_pages=st.integers(2, 40),
    window=st.sampled_from([None, 5, 8, 20]),
    policy=st.sampled_from(["fair", "fcfs"]),
    overcommit=st.sampled_from([1.0, 1.0, 1.5, 4.0, 16.0]),
)
def test_any_trace_ends_each_request_once_with_the_tokens_of_a_solo_run(
    trace: list[Arrival], num_pages: int, window: int | None, policy: str, overcommit: float
) -> None:
    world = simulate(trace, small_memory(num_pages, window), policy=policy, overcommit=overcommit)
    check_outcomes(world, trace)
    assert all(t.num_running == t.reserved_bytes == t.prefill_left == 0 for t in world.scheduler.book)
    assert all(t.bucket is None or t.bucket.held == 0 for t in world.scheduler.book)
    assert all(t.num_prefilling == 0 and not t.queue for t in world.scheduler.book)
    assert Counter(r.tenant for r in world.tape.requests) == Counter(world.tape.accepts)
    if overcommit == 1.0:
        assert not any("pages" in step.preemptions for step in world.tape.steps)
    check_steps(world)


def check_steps(world: World) -> None:
    """What steps tell adds up to what requests tell, whoever was preempted or cancelled."""
    steps, requests = world.tape.steps, world.tape.requests
    cached = sum(sum(step.cached_tokens.values()) for step in steps)
    computed = sum(sum(step.prompt_tokens.values()) for step in steps) + cached
    assert cached == sum(r.cached_tokens for r in requests)
    assert computed >= sum(r.prompt_tokens for r in requests if r.generated_tokens)
    assert computed <= sum(r.prompt_tokens for r in requests)
    if all(r.generated_tokens for r in requests):
        assert computed == sum(r.prompt_tokens for r in requests)
    assert sum(s.joined for s in steps) == sum(s.left + sum(s.preemptions.values()) for s in steps)


def crowd(seed: int) -> list[Arrival]:
    """Many more requests than rows, arriving in bursts."""
    random = Random(seed)
    return [
        Arrival(
            turn=random.choice([0, 0, 5, random.randrange(60)]),
            tenant=random.choice(TENANTS).name,
            num_prompt=random.choice([1, 2, random.randrange(1, 70)]),
            max_tokens=random.randrange(1, 30),
            seed=random.randrange(4),
            stop_token=random.choice([None, None, random.randrange(10)]),
            cancel_after=random.choice([None, None, random.randrange(40)]),
            priority=random.choice(list(Priority)),
        )
        for _ in range(random.randrange(20, 50))
    ]


@pytest.mark.parametrize("overcommit", [1.0, 3.0])
@pytest.mark.parametrize("seed", range(25))
def test_a_crowd_ends_each_request_once_with_the_tokens_of_a_solo_run(seed: int, overcommit: float) -> None:
    trace, random = crowd(seed), Random(seed)
    memory = small_memory(random.randrange(6, 30), random.choice([None, 5, 20]))
    world = simulate(trace, memory, policy=random.choice(["fair", "fcfs"]), overcommit=overcommit)
    check_outcomes(world, trace)


@settings(max_examples=15, deadline=None)
@given(trace=arrivals, overcommit=st.sampled_from([1.0, 4.0]))
def test_the_same_trace_gives_the_same_schedule(trace: list[Arrival], overcommit: float) -> None:
    memory = small_memory(12)
    first, second = (simulate(trace, memory, policy="fair", overcommit=overcommit) for _ in range(2))
    assert first.plans == second.plans
    assert first.events == second.events


@pytest.mark.parametrize("num_requests", [2, 5, 12])
def test_overcommitted_rows_all_end_and_each_preemption_pays(num_requests: int) -> None:
    """All of them need nearly the whole pool: the worst case for ping-pong."""
    trace = [Arrival(0, "acme", 30, 40, seed, None, None) for seed in range(min(num_requests, 6))]
    trace += [Arrival(0, "beta", 5, 40, seed, None, None) for seed in range(num_requests - len(trace))]
    world = simulate(trace, small_memory(10), policy="fair", overcommit=16.0, slice_tokens=None)
    check_outcomes(world, trace)
    check_steps(world)
    preemptions = sum(n for step in world.tape.steps for n in step.preemptions.values())
    assert 0 < preemptions <= 3 * num_requests


def test_a_request_alone_gives_the_tokens_the_runner_promises() -> None:
    world = World(make_config())
    prompt = tuple(range(50))
    key = RequestKey("acme", "only")
    world.submit(Submission(key, prompt, SamplingParams(max_tokens=9, seed=5), 0.0))
    world.run()
    tokens = [token for e in world.events if isinstance(e, Tokens) for token in e.token_ids]
    assert tokens == fake_completion(prompt, 5, 9, VOCAB)
