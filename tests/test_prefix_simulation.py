"""Whatever tenants do with shared prompts, tokens are those of a cold run alone and nothing leaks."""

from collections import defaultdict
from dataclasses import dataclass
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import World, make_config, make_tenant

from mlxd.batching.fake_runner import FakeRunner, fake_completion, fake_memory
from mlxd.batching.plan import DecodeEntry
from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.config import CacheConfig
from mlxd.scheduler.events import Accepted, Finished, RequestKey, Submission, Tokens

PAGE = 8
VOCAB = 10
BAD_SEED, BAD_INDEX = 3, 5
TENANTS = (make_tenant("acme", max_running=4), make_tenant("beta", weight=2.0, kv_share=0.8))


@dataclass(frozen=True)
class Ask:
    """A prompt of `num_shared` tokens out of document `base`, and a tail of its own."""

    turn: int
    tenant: str
    base: int
    num_shared: int
    tail: int
    max_tokens: int
    seed: int
    cancel_after: int | None

    @property
    def prompt(self) -> tuple[int, ...]:
        shared = tuple((self.base * 3 + p * 7 + p // 5) % VOCAB for p in range(self.num_shared))
        return shared + tuple((self.tail * p + self.base) % VOCAB for p in range(1 + self.tail))

    @property
    def expected(self) -> list[int]:
        tokens = fake_completion(self.prompt, self.seed, self.max_tokens, VOCAB)
        return tokens[:BAD_INDEX] if self.seed == BAD_SEED else tokens


asks = st.lists(
    st.builds(
        Ask,
        turn=st.integers(0, 60),
        tenant=st.sampled_from([tenant.name for tenant in TENANTS]),
        base=st.integers(0, 1),
        num_shared=st.sampled_from([0, 7, 8, 9, 16, 40, 41, 56]),
        tail=st.integers(0, 9),
        max_tokens=st.integers(1, 25),
        seed=st.integers(0, BAD_SEED),
        cancel_after=st.none() | st.integers(0, 30),
    ),
    min_size=1,
    max_size=16,
)


KINDS: dict[str, dict[str, object]] = {
    "full": {},
    "full and sliding": {"window": 20, "num_window_pages": 22},
    "sliding": {"has_full": False, "window": 9, "num_window_pages": 20},
    "full and state": {"has_state": True, "num_states": 14},
    "state": {"has_full": False, "has_state": True, "num_states": 14},
    "packed on the way": {"boundary": 32},
    "all": {"window": 12, "num_window_pages": 30, "has_state": True, "num_states": 16, "boundary": 16},
}
"""Groups of a model, their pools not much larger than the rows need."""


def simulate(
    trace: list[Ask], *, num_pages: int, overcommit: float, kind: str = "full", prefix: bool = True
) -> World:
    """Submit and cancel by the trace, then run until idle; integrity is checked after every step."""

    def fault(entry: DecodeEntry) -> str | None:
        return "numeric" if entry.row.seed == BAD_SEED and entry.output_index == BAD_INDEX else None

    config = make_config(*TENANTS, overcommit=overcommit, max_rows=5)
    config = msgspec.structs.replace(config, cache=CacheConfig(prefix=prefix))
    fields: dict[str, object] = {"chunk": 16, "page_size": PAGE, "num_pages": num_pages, **KINDS[kind]}
    plan = fake_memory(max_rows=5, max_model_len=100, **fields)  # type: ignore[arg-type]
    world = World(config, FakeRunner(plan, vocab_size=VOCAB, prefill_s_per_token=0.01, decode_fault=fault))
    for turn in range(95):
        for index, ask in enumerate(trace):
            key = RequestKey(ask.tenant, str(index))
            if ask.turn == turn:
                sampling = SamplingParams(max_tokens=ask.max_tokens, seed=ask.seed)
                world.submit(Submission(key, ask.prompt, sampling, world.now))
            if ask.cancel_after is not None and ask.turn + ask.cancel_after == turn:
                world.cancel(key)
        if not world.is_idle:
            world.turn()
    world.run()
    return world


def check_outcomes(world: World, trace: list[Ask]) -> None:
    opened = [event.key for event in world.events if isinstance(event, Accepted)]
    ends = [event for event in world.events if isinstance(event, Finished)]
    assert sorted(event.key for event in ends) == sorted(opened)
    tokens: dict[RequestKey, list[int]] = defaultdict(list)
    for event in world.events:
        if isinstance(event, Tokens):
            tokens[event.key] += event.token_ids
    for event in ends:
        expected = trace[int(event.key.request_id)].expected
        assert tokens[event.key] == expected[: len(tokens[event.key])]
        if event.outcome != "cancelled":
            assert tokens[event.key] == expected
    space = world.scheduler.space
    space.check_empty()
    assert all(t.num_running == t.reserved_bytes == t.prefill_left == 0 for t in world.scheduler.book)


def check_sharing(world: World, trace: list[Ask]) -> None:
    """No request finds more than the full pages it has in common with others of its tenant."""
    for event in world.events:
        if not isinstance(event, Finished):
            continue
        index = int(event.key.request_id)
        ask = trace[index]
        mates = [a for i, a in enumerate(trace) if i != index and a.tenant == ask.tenant]
        most = max((common(ask.prompt, [*mate.prompt, *mate.expected]) for mate in mates), default=0)
        assert event.usage.cached_tokens % PAGE == 0
        assert event.usage.cached_tokens <= min(most, len(ask.prompt) - 1)


def common(one: tuple[int, ...], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@settings(max_examples=150, deadline=None)
@given(
    trace=asks,
    num_pages=st.integers(2, 40),
    overcommit=st.sampled_from([1.0, 1.0, 1.5, 4.0, 16.0]),
    kind=st.sampled_from(sorted(KINDS)),
)
def test_any_trace_gives_the_tokens_of_cold_runs_and_leaves_nothing_but_cached_pages(
    trace: list[Ask], num_pages: int, overcommit: float, kind: str
) -> None:
    world = simulate(trace, num_pages=num_pages, overcommit=overcommit, kind=kind)
    check_outcomes(world, trace)
    check_sharing(world, trace)


def crowd(seed: int) -> list[Ask]:
    random = Random(seed)
    return [
        Ask(
            turn=random.choice([0, 0, 5, random.randrange(80)]),
            tenant=random.choice(TENANTS).name,
            base=random.randrange(2),
            num_shared=random.choice([0, 8, 16, 40, 56]),
            tail=random.randrange(10),
            max_tokens=random.randrange(1, 25),
            seed=random.choice([0, 0, 0, 1, 2, BAD_SEED]),
            cancel_after=random.choice([None, None, None, random.randrange(40)]),
        )
        for _ in range(40)
    ]


@pytest.mark.parametrize("overcommit", [1.0, 3.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_a_crowd_computes_less_than_without_sharing_under_any_pressure(
    seed: int, kind: str, overcommit: float
) -> None:
    trace, num_pages = crowd(seed), Random(seed).randrange(12, 60)
    worlds = [
        simulate(trace, num_pages=num_pages, overcommit=overcommit, kind=kind, prefix=on)
        for on in (True, False)
    ]
    for world in worlds:
        check_outcomes(world, trace)
    check_sharing(worlds[0], trace)
    hits = [sum(sum(s.prefix_hit_tokens.values()) for s in world.tape.steps) for world in worlds]
    assert hits[0] > hits[1] == 0
    chunks = [sum(item[3] - item[2] for p in w.plans for item in p if item[0] == "chunk") for w in worlds]  # type: ignore[operator]
    if overcommit == 1.0:
        assert chunks[0] < chunks[1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_trace_gives_the_same_schedule(kind: str) -> None:
    plans = [simulate(crowd(1), num_pages=30, overcommit=2.0, kind=kind).plans for _ in range(2)]
    assert plans[0] == plans[1]


def test_pages_of_the_cache_are_given_up_under_pressure_and_rows_always_get_theirs() -> None:
    trace = [Ask(t, "acme", t % 2, 56, t % 10, 20, 0, None) for t in range(0, 60, 2)]
    world = simulate(trace, num_pages=14, overcommit=1.0)
    check_outcomes(world, trace)
    assert world.scheduler.space.num_evicted > 0
    assert not any(step.preemptions for step in world.tape.steps)
