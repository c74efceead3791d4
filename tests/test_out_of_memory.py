"""Memory runs out in a step: the row that entered last ends, the others go on as if nothing had been."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import VOCAB, make_config, make_tenant, submission
from starving import REASON, Play, StarvedRunner, play

from mlxd.batching.fake_runner import fake_completion, fake_memory
from mlxd.caches.disk_store import DiskStore
from mlxd.caches.disk_tier import DiskTier
from mlxd.caches.persistence import PageCodec
from mlxd.scheduler.config import Config
from mlxd.scheduler.events import Accepted, RequestKey, Submission
from mlxd.scheduler.inbox import Cancel, Command, Pause, Stop, Unpause
from mlxd.scheduler.priority import Priority
from mlxd.scheduler.request import Request
from mlxd.scheduler.scheduler import Scheduler

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "full and sliding": {"window": 20, "num_window_pages": 30},
    "full and state": {"has_state": True, "num_states": 12},
    "all, packed on the way": {"window": 12, "has_state": True, "boundary": 32},
}
TENANTS = ("acme", "beta")


def starved(failing: set[int], kind: str = "full", **memory: Any) -> StarvedRunner:
    sizes = {"max_rows": 8, "max_model_len": 128, "chunk": 16, "page_size": 8} | KINDS[kind] | memory
    return StarvedRunner(fake_memory(**sizes), failing, vocab_size=VOCAB)


def config_of(**scheduler: object) -> Config:
    tenants = [
        make_tenant("acme", max_running=3, tokens_per_minute=4000),
        make_tenant("beta", max_running=4),
    ]
    return make_config(*tenants, **scheduler)


def send(name: str, tenant: str = "acme", num_prompt: int = 20, max_tokens: int = 12) -> Submission:
    return submission(name, range(num_prompt), tenant=tenant, max_tokens=max_tokens)


def youngest(scheduler: Scheduler) -> Request | None:
    return next(reversed(scheduler.batch._running.values()), None)


def run(
    failing: set[int],
    turns: list[list[Command]],
    *,
    kind: str = "full",
    disk: DiskTier | None = None,
    config: Config | None = None,
    **memory: Any,
) -> tuple[Play, StarvedRunner]:
    """Play it, and check what holds whenever memory runs out."""
    runner = starved(failing, kind, **memory)
    owed: list[RequestKey] = []

    def prepare(scheduler: Scheduler) -> None:
        def note() -> None:
            last = youngest(scheduler)
            if last is not None:
                owed.append(last.key)

        runner.on_failure = note

    def check_caps(scheduler: Scheduler) -> None:
        scheduler.space.check_integrity()
        for tenant in scheduler.book:
            mine = [request for request in scheduler._open.values() if request.tenant == tenant.name]
            assert tenant.num_running <= tenant.max_running
            assert tenant.bucket is None or tenant.bucket.held == sum(
                request.quota if request.row is not None else request.num_inflight for request in mine
            )

    played = play(
        config or config_of(),
        runner,
        turns,
        disk=disk,
        prepare=prepare,
        watch=check_caps,
    )
    assert not played.failure
    assert [end.key for end in played.ends if end.outcome == "failed"] == owed
    check_ends(played)
    check_nothing_is_held(played.scheduler)
    return played, runner


def check_ends(played: Play) -> None:
    """One end each, and each token is that of an undisturbed run."""
    accepted = Counter(event.key for event in played.events if isinstance(event, Accepted))
    assert Counter(end.key for end in played.ends) == accepted
    for end in played.ends:
        tokens = played.tokens(end.key)
        assert tokens == fake_completion(range(end.usage.prompt_tokens), 7, len(tokens), VOCAB)
        assert len(tokens) == end.usage.completion_tokens
        assert end.error_code == ("out_of_memory" if end.outcome == "failed" else "")


def check_nothing_is_held(scheduler: Scheduler) -> None:
    scheduler.space.check_empty()
    for tenant in scheduler.book:
        assert (tenant.num_running, tenant.reserved_bytes, tenant.prefill_left, len(tenant.queue)) == (0,) * 4
        assert tenant.bucket is None or tenant.bucket.held == 0


REQUESTS = st.tuples(st.sampled_from(TENANTS), st.integers(1, 50), st.integers(1, 24))


@st.composite
def scripts(draw: st.DrawFn) -> list[list[Command]]:
    """Requests over some turns, some of which are paused for a while, or cancelled."""
    turns: list[list[Command]] = [[] for _ in range(50)]
    for number, shape in enumerate(draw(st.lists(REQUESTS, min_size=1, max_size=10))):
        at, request = draw(st.integers(0, 25)), send(str(number), *shape)
        turns[at].append(request)
        later = at + draw(st.integers(1, 14))
        match draw(st.integers(0, 4)):
            case 0:
                turns[later].append(Cancel(request.key, "cancelled"))
            case 1:
                turns[later].append(Pause(request.key))
                turns[later + draw(st.integers(0, 10))].append(Unpause(request.key))
    return turns


@settings(max_examples=150, deadline=None)
@given(scripts(), st.sets(st.integers(0, 90), max_size=8), st.sampled_from(sorted(KINDS)), st.booleans())
def test_whenever_it_happens_each_request_ends_once_and_the_others_draw_the_same_tokens(
    turns: list[list[Command]], failing: set[int], kind: str, is_overcommitted: bool
) -> None:
    few = {"num_pages": 30} if is_overcommitted else {}
    run(failing, turns, kind=kind, config=config_of(overcommit=2.0 if is_overcommitted else 1.0), **few)


@pytest.mark.parametrize("call", range(40))
def test_each_call_of_a_run_may_be_the_one(call: int) -> None:
    turns: list[list[Command]] = [[send("a0"), send("b0", "beta", 40)], [], [], [send("a1"), send("b1")]]
    played, runner = run({call}, turns)
    assert runner.num_failed == 1
    assert Counter(end.outcome for end in played.ends) <= Counter(failed=1, length=4)
    assert played.snapshots[-1].out_of_memory == 1


def test_memory_that_stays_short_ends_one_row_after_the_other_and_then_serves_the_next() -> None:
    turns: list[list[Command]] = [[send("a0"), send("a1"), send("b0", "beta")]]
    turns += [[] for _ in range(12)] + [[send("late")]]
    played, runner = run({4, 5, 6}, turns)
    assert runner.num_failed == 3
    assert {end.key.request_id: end.outcome for end in played.ends} == {
        "a0": "failed",
        "a1": "failed",
        "b0": "failed",
        "late": "length",
    }


def test_the_engine_fails_where_it_happens_again_with_no_row_left_and_no_step_in_between() -> None:
    class Restless(StarvedRunner):
        def maintain(self) -> bool:
            self._allocate()
            return False

    runner = Restless(fake_memory(), {0, 7, 8}, vocab_size=VOCAB)
    played = play(config_of(), runner, [[], [send("a0", max_tokens=1)]])
    assert played.failure == REASON
    assert runner.num_failed == 3, "the first alone was borne"
    assert [end.outcome for end in played.ends] == ["length"]


@pytest.mark.parametrize("call", [0, 3, 7])
def test_the_engine_fails_as_ever_where_a_runner_without_rows_finds_no_memory(call: int) -> None:
    runner = starved({call})
    runner.resets_fail = True
    played = play(config_of(), runner, [[send("a0"), send("b0", "beta")], [send("a1")]])
    assert played.failure == REASON
    ends = {end.key.request_id: end.error_code for end in played.ends}
    assert Counter(ends.values()) == Counter(out_of_memory=1, engine_failed=len(ends) - 1)
    assert set(ends) == {event.key.request_id for event in played.events if isinstance(event, Accepted)}


@pytest.mark.parametrize("call", range(4, 16))
def test_tokens_in_flight_of_a_row_that_made_way_are_held_no_more(call: int) -> None:
    """The minute's tokens of a tenant whose row was preempted when a step that draws for it is lost."""
    lower = replace(send("lower", max_tokens=40), priority=Priority.BATCH)
    turns: list[list[Command]] = [[lower], [], [], [], [send("higher", "beta", max_tokens=3)]]
    played, _ = run({call}, turns, config=config_of(max_rows=1))
    assert sum((Counter(step.preemptions) for step in played.tape.steps), Counter())["priority"] <= 1


@pytest.mark.parametrize("call", range(4, 24))
def test_a_request_whose_client_paused_it_pays_for_that_and_not_for_the_shortage(call: int) -> None:
    slow = send("slow", max_tokens=30)
    turns: list[list[Command]] = [[slow], [], [], [], [Pause(slow.key)], [], [], [Unpause(slow.key)]]
    turns += [[], [], [], [send("young", "beta", 3, 40)]]
    undisturbed, _ = run(set(), turns)
    played, _ = run({call}, turns)
    failed = [end.key.request_id for end in played.ends if end.outcome == "failed"]
    assert len(failed) == (call != 7), "in that call no row was there"
    if failed == ["young"]:
        assert played.scheduler.book["acme"].received == undisturbed.scheduler.book["acme"].received


def test_it_is_no_preemption_that_counts_and_costs_no_tenant_anything() -> None:
    turns: list[list[Command]] = [[send("a0"), send("a1", num_prompt=30), send("b0", "beta")], []]
    turns += [[], [send("last", "beta", 10, 3)]]
    played, _ = run({9}, turns, config=config_of(max_preemptions=0))
    undisturbed, _ = run(set(), turns)
    assert [end.key.request_id for end in played.ends if end.outcome == "failed"] == ["last"]
    assert sum((Counter(step.preemptions) for step in played.tape.steps), Counter()) == {"memory": 3}
    assert played.scheduler.fairness.preemptions == {"memory": 3}
    for name in TENANTS:
        tenant, other = played.scheduler.book[name], undisturbed.scheduler.book[name]
        assert tenant.service - tenant.received == other.service - other.received, "what it was lifted by"
        assert name == "beta" or tenant.received == other.received


def test_what_lost_steps_had_planned_is_told_with_the_next_one() -> None:
    turns: list[list[Command]] = [[send(f"a{n}", num_prompt=30 + n) for n in range(3)], [], []]
    turns += [[] for _ in range(60)] + [[send("late", num_prompt=3)]]
    played, _ = run({1, 2, 7}, turns)
    steps = played.tape.steps
    joined, left = sum(step.joined for step in steps), sum(step.left for step in steps)
    assert joined == left + sum(sum(step.preemptions.values()) for step in steps)
    computed = sum(sum((*s.prompt_tokens.values(), *s.cached_tokens.values())) for s in steps)
    gave_all = {end.key for end in played.ends if end.usage.completion_tokens}
    assert computed >= sum(end.usage.prompt_tokens for end in played.ends if end.key in gave_all)
    assert sum(sum(step.generated_tokens.values()) for step in steps) == sum(
        end.usage.completion_tokens for end in played.ends
    )


def test_it_is_logged_once_with_whom_it_ended(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run({4}, [[send("a0"), send("b0", "beta")], []])
    [record] = caplog.records
    assert record.getMessage() == f"out of memory: {REASON} ended=beta/b0 waiting=1"


@pytest.mark.parametrize("call", range(4, 12))
def test_a_stop_is_no_failure_where_memory_runs_out_in_the_last_steps(call: int) -> None:
    turns: list[list[Command]] = [[send("a0", max_tokens=30)], [], [], [], [Stop()]]
    runner = starved({call})
    played = play(config_of(), runner, turns)
    assert not played.failure
    assert played.snapshots[-1].state == "stopped"
    assert len(played.ends) == 1


@contextmanager
def disk_in(folder: Path, runner: StarvedRunner) -> Iterator[DiskTier]:
    store = DiskStore(folder, 10**6)
    ticks = count()
    codec = PageCodec(runner.page_formats, b"secret")
    disk = DiskTier(store, codec, clock=lambda: next(ticks) / 1000, step_s=1e9)
    yield disk
    disk.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("failing", [{5}, {12, 13}, {30}, {3, 20, 40}])
def test_no_page_goes_to_disk_whose_content_is_unknown_and_those_there_stay(
    tmp_path: Path, kind: str, failing: set[int]
) -> None:
    """A runner checks each page that a row begins with; the second one has nothing but the disk."""
    turns: list[list[Command]] = []
    for n in range(8):
        turns += [[send(f"a{n}", num_prompt=20 + 3 * n), send(f"b{n}", "beta", 45)], *([[]] * 6)]
    for number, calls in enumerate((failing, set[int]())):
        runner = starved(calls, kind)
        with disk_in(tmp_path, runner) as disk:
            run(calls, turns, kind=kind, disk=disk)
            assert number == 0 or disk.stats.pages["loaded"] > 0
            assert all(disk.stats.misses[reason] == 0 for reason in ("corrupt", "truncated", "foreign"))
