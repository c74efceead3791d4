"""The engine thread: what any thread may ask of it, and what it tells."""

import threading
from collections.abc import Iterator

import pytest
from engine_harness import WAIT_S, MakeHarness, harnesses
from scheduling import VOCAB, make_config, make_tenant, submission

from mlxd.batching.fake_runner import fake_completion
from mlxd.scheduler.errors import (
    InvalidParamError,
    InvalidPromptError,
    MlxdError,
    RejectedError,
)
from mlxd.scheduler.events import Accepted, Finished, RequestKey, Tokens


@pytest.fixture
def make() -> Iterator[MakeHarness]:
    yield from harnesses()


def test_requests_of_many_threads_each_get_their_tokens(make: MakeHarness) -> None:
    harness = make().start()

    def send(first: int) -> None:
        for number in range(first, first + 5):
            harness.engine.submit(submission(str(number), (number,), seed=number, max_tokens=6))

    threads = [threading.Thread(target=send, args=(first,)) for first in (0, 5, 10, 15)]
    for thread in threads:
        thread.start()
    ends = harness.ended(20)
    for number in range(20):
        mine = [e for e in harness.events if e.key.request_id == str(number)]
        assert isinstance(mine[0], Accepted)
        tokens = [token for e in mine if isinstance(e, Tokens) for token in e.token_ids]
        assert tokens == fake_completion((number,), number, 6, VOCAB)
        assert isinstance(mine[-1], Finished)
    assert {e.outcome for e in ends} == {"length"}


def test_accepted_is_told_before_a_step_is_waited_for(make: MakeHarness) -> None:
    harness = make(hang_at_step=1).start()
    harness.engine.submit(submission("x"))
    assert isinstance(harness.batches.get(timeout=WAIT_S)[0], Accepted)


def test_a_step_that_hangs_is_seen_in_the_snapshot_and_leaves_pings_unanswered(make: MakeHarness) -> None:
    harness = make(hang_at_step=1).start()
    harness.engine.submit(submission("x"))
    harness.until(bool)
    answered = threading.Event()
    harness.engine.ping(answered.set)
    snapshot = harness.engine.snapshot
    assert (snapshot.state, snapshot.running, snapshot.last_step_at) == ("running", 1, 0.0)
    assert snapshot.busy_since > 0
    assert not harness.engine.stop(0.05)
    assert not answered.is_set()
    harness.runner.resume.set()
    assert answered.wait(WAIT_S)


def test_cancel_ends_a_request_and_an_unknown_key_is_nothing(make: MakeHarness) -> None:
    harness = make(hang_at_step=4).start()
    harness.engine.cancel(RequestKey("acme", "nobody"))
    harness.engine.submit(submission("x", max_tokens=100))
    harness.until(lambda events: any(isinstance(e, Tokens) for e in events))
    harness.engine.cancel(RequestKey("acme", "x"), "client_gone")
    harness.runner.resume.set()
    [end] = harness.ended(1)
    assert end.outcome == "client_gone"


def test_draining_finishes_what_is_open_and_refuses_the_rest(make: MakeHarness) -> None:
    harness = make(hang_at_step=1).start()
    harness.engine.submit(submission("open"))
    harness.until(bool)
    harness.engine.drain()
    with pytest.raises(RejectedError, match="draining") as refused:
        harness.engine.submit(submission("late"))
    assert (refused.value.reason, refused.value.retryable) == ("draining", True)
    harness.runner.resume.set()
    assert harness.ended(1)[0].outcome == "length"
    assert harness.engine.snapshot.state == "draining"


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "message"),
    [
        ((), {}, InvalidPromptError, "the prompt is empty"),
        ((1, VOCAB), {}, InvalidPromptError, f"token id {VOCAB}; ids are from 0 to {VOCAB - 1}"),
        ((-1,), {}, InvalidPromptError, f"token id -1; ids are from 0 to {VOCAB - 1}"),
        ((1,), {"max_tokens": 0}, InvalidParamError, "max_tokens is 0"),
        ((1,), {"stop_token_ids": (VOCAB,)}, InvalidParamError, f"stop_token_ids[0] is {VOCAB}"),
    ],
)
def test_what_can_never_be_computed_is_refused_by_name_and_value(
    make: MakeHarness,
    prompt: tuple[int, ...],
    sampling: dict[str, object],
    error: type[MlxdError],
    message: str,
) -> None:
    harness = make().start()
    with pytest.raises(error) as refused:
        harness.engine.submit(submission("x", prompt, **sampling))  # type: ignore[arg-type]
    assert message in str(refused.value)


def test_the_inbox_is_bounded_even_while_a_step_hangs(make: MakeHarness) -> None:
    harness = make(make_config(max_waiting=5), hang_at_step=1).start()
    harness.engine.submit(submission("first"))
    harness.until(bool)
    for number in range(5):
        harness.engine.submit(submission(str(number)))
    with pytest.raises(RejectedError) as refused:
        harness.engine.submit(submission("one more"))
    assert (refused.value.reason, refused.value.retryable) == ("queue_full", True)
    assert refused.value.retry_after_ms > 0
    harness.runner.resume.set()
    assert len(harness.ended(6)) == 6


def test_an_idle_engine_holds_nothing_and_does_put_off_work_until_none_is_left(make: MakeHarness) -> None:
    harness = make()
    left = [True, True, False]
    done = threading.Event()

    def maintain() -> bool:
        more = left.pop(0) if left else False
        if not left:
            done.set()
        return more

    harness.runner.maintain = maintain  # type: ignore[method-assign]
    harness.start()
    assert done.wait(WAIT_S)
    harness.engine.submit(submission("x"))
    harness.ended(1)
    snapshot = harness.engine.snapshot
    assert (snapshot.running, snapshot.waiting, snapshot.kv_used_bytes, snapshot.kv_reserved_bytes) == (
        0,
    ) * 4
    assert snapshot.tenants["acme"].service > 0


def test_snapshots_and_counts_are_of_one_moment(make: MakeHarness) -> None:
    """What is accepted and not ended is waiting or running in the snapshot told next."""
    harness = make(make_config(make_tenant("acme", max_waiting=64)))
    told = []
    tape = harness.tape

    def snapshot(of_now) -> None:  # type: ignore[no-untyped-def]
        told.append((len(tape.accepts) - len(tape.requests), of_now.waiting + of_now.running))
        told.append((len(tape.accepts) - len(tape.requests), sum_open(of_now)))

    def sum_open(of_now) -> int:  # type: ignore[no-untyped-def]
        return sum(t.waiting + t.running for t in of_now.tenants.values())

    tape.snapshot = snapshot  # type: ignore[method-assign]
    harness.start()
    for number in range(30):
        harness.engine.submit(submission(str(number), max_tokens=1 + number % 5))
    harness.ended(30)
    assert len(told) > 10
    assert all(counted == shown for counted, shown in told)


def test_steps_tell_how_long_joining_and_leaving_took(make: MakeHarness) -> None:
    harness = make().start()
    harness.engine.submit(submission("x", max_tokens=5))
    harness.ended(1)
    harness.engine.stop(WAIT_S)
    for step in harness.tape.steps:
        assert (step.join_s > 0) == (step.joined > 0)
        assert (step.leave_s > 0) == (step.left > 0)
