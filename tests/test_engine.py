"""The engine thread: what any thread may ask of it, and how it ends."""

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from scheduling import VOCAB, Tape, fake_factory, make_config, make_tenant, submission

from mlxd.batching.errors import ModelError
from mlxd.batching.fake_runner import FakeRunner, fake_completion, fake_memory
from mlxd.batching.runner import Progress, Runner
from mlxd.scheduler.config import Config
from mlxd.scheduler.engine import Engine
from mlxd.scheduler.errors import (
    ClientTimeoutError,
    EngineFailedError,
    InvalidParamError,
    InvalidPromptError,
    MlxdError,
    RejectedError,
)
from mlxd.scheduler.events import Accepted, Event, Finished, Rejected, RequestKey, Tokens
from mlxd.scheduler.inbox import Stop

WAIT_S = 10.0


class Harness:
    """An engine on a fake runner, and its events."""

    def __init__(self, config: Config | None = None, **runner: object) -> None:
        memory = fake_memory(max_rows=8, max_model_len=256)
        self.runner = FakeRunner(memory, vocab_size=VOCAB, **runner)  # type: ignore[arg-type]
        self.tape = Tape()
        self.engine = Engine(
            config or make_config(), runner_factory=self._make_runner, recorder=self.tape, seed=0
        )
        self.batches: queue.SimpleQueue[Sequence[Event]] = queue.SimpleQueue()
        self.events: list[Event] = []

    def _make_runner(self, config: Config, progress: Progress) -> Runner:
        return self.runner

    def start(self) -> "Harness":
        self.engine.start(self.batches.put)
        self.engine.wait_ready(WAIT_S)
        return self

    def until(self, condition: Callable[[list[Event]], bool]) -> list[Event]:
        while not condition(self.events):
            self.events += self.batches.get(timeout=WAIT_S)
        return self.events

    def ended(self, count: int) -> list[Finished]:
        self.until(lambda events: sum(isinstance(e, Finished) for e in events) >= count)
        return [e for e in self.events if isinstance(e, Finished)]


@pytest.fixture
def make() -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def build(config: Config | None = None, **runner: object) -> Harness:
        made.append(Harness(config, **runner))
        return made[-1]

    yield build
    for harness in made:
        harness.runner.resume.set()
        assert harness.engine.stop(WAIT_S)


MakeHarness = Callable[..., Harness]


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


def test_stop_ends_what_is_open_closes_the_runner_and_may_be_repeated(make: MakeHarness) -> None:
    harness = make(make_config(max_rows=1), hang_at_step=3).start()
    harness.engine.submit(submission("running", max_tokens=100))
    harness.engine.submit(submission("waiting"))
    harness.until(lambda events: any(isinstance(e, Tokens) for e in events))
    harness.engine.stop(0.0)
    harness.runner.resume.set()
    assert harness.engine.stop(WAIT_S)
    ends = harness.ended(2)
    assert {(e.outcome, e.error_code) for e in ends} == {("draining", "draining")}
    assert harness.runner.closed
    last = harness.engine.snapshot
    assert (last.state, last.running, last.waiting, last.kv_reserved_bytes) == ("stopped", 0, 0, 0)
    assert harness.engine.stop(0.0)


@pytest.mark.parametrize("end", ["stop", "failure"])
def test_what_was_sent_and_not_seen_when_the_engine_ended_is_refused(
    make: MakeHarness, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    harness = make().start()

    def send_unseen() -> None:
        """Runs among the commands of one turn, so what it sends is for a turn that never comes."""
        if end == "stop":
            harness.engine._inbox.send(Stop())
            harness.engine.ping(lambda: harness.engine.submit(submission("unseen")))
        else:
            harness.engine.submit(submission("unseen"))
            raise RuntimeError("no more")

    with caplog.at_level(logging.CRITICAL):
        harness.engine.ping(send_unseen)
        [refused] = harness.until(bool)
    assert isinstance(refused, Rejected)
    assert (refused.reason, refused.retryable) == ("draining", True)
    assert harness.tape.rejects == [("acme", "draining")]


@pytest.mark.parametrize("at_step", [1, 2, 5])
def test_a_failed_step_ends_every_open_request_and_the_engine(
    make: MakeHarness, caplog: pytest.LogCaptureFixture, at_step: int
) -> None:
    harness = make(make_config(max_rows=2), fail_at_step=at_step, hang_at_step=1)
    with caplog.at_level(logging.ERROR):
        harness.start()
        for number in range(4):
            harness.engine.submit(submission(str(number), max_tokens=50))
        harness.runner.resume.set()
        ends = harness.ended(1)
    assert harness.engine.stop(WAIT_S)
    late = {e.key for e in harness.events if isinstance(e, Rejected)}
    assert len({e.key for e in ends} | late) == 4
    assert {(e.outcome, e.error_code) for e in ends} == {("failed", "engine_failed")}
    assert f"RuntimeError: step {at_step} fails as asked" in ends[0].error
    assert harness.engine.snapshot.state == "failed"
    assert harness.engine.snapshot.error == ends[0].error
    assert harness.engine.snapshot.running == harness.engine.snapshot.waiting == 0
    assert len([record for record in caplog.records if record.exc_info]) == 1
    assert len(harness.tape.requests) == len(harness.tape.accepts)
    with pytest.raises(EngineFailedError, match="fails as asked"):
        harness.engine.submit(submission("after"))
    assert harness.engine.stop(WAIT_S)
    assert harness.runner.closed


def test_an_error_in_the_event_callback_ends_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    calls: queue.SimpleQueue[Sequence[Event]] = queue.SimpleQueue()
    broken = iter([True])

    def break_once(events: Sequence[Event]) -> None:
        calls.put(events)
        if next(broken, False):
            raise ValueError("no room")

    with caplog.at_level(logging.CRITICAL), Engine(make_config(), runner_factory=fake_factory) as engine:
        engine.start(break_once)
        engine.wait_ready(WAIT_S)
        engine.submit(submission("x"))
        first, last = calls.get(timeout=WAIT_S), calls.get(timeout=WAIT_S)
    assert [type(e) for e in first] == [Accepted]
    assert [type(e) for e in last] == [Finished]
    assert engine.snapshot.error == "ValueError: no room"


@pytest.mark.parametrize(
    ("raised", "told", "message"),
    [
        (ModelError("model.safetensors is cut off"), ModelError, "model.safetensors is cut off"),
        (ZeroDivisionError("oh"), EngineFailedError, "ZeroDivisionError: oh"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_told_with_its_reason(
    raised: Exception, told: type[MlxdError], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(config: Config, progress: Progress) -> Runner:
        raise raised

    with caplog.at_level(logging.CRITICAL), Engine(make_config(), runner_factory=broken) as engine:
        engine.start(lambda events: None)
        with pytest.raises(told) as failure:
            engine.wait_ready(WAIT_S)
        assert str(failure.value) == message
        assert (engine.snapshot.state, engine.snapshot.error) == ("failed", message)
        with pytest.raises(EngineFailedError, match=message):
            engine.submit(submission("x"))


def test_while_loading_requests_are_refused_and_progress_is_told() -> None:
    told: list[tuple[str, float]] = []
    go_on = threading.Event()

    def slow(config: Config, progress: Progress) -> Runner:
        progress("load", 0.5)
        go_on.wait(WAIT_S)
        return fake_factory(config, progress)

    with Engine(make_config(), runner_factory=slow) as engine:
        engine.start(lambda events: None, lambda stage, share: told.append((stage, share)))
        with pytest.raises(ClientTimeoutError):
            engine.wait_ready(0.05)
        assert engine.snapshot.state == "starting"
        with pytest.raises(RejectedError) as refused:
            engine.submit(submission("x"))
        go_on.set()
        assert engine.wait_ready(WAIT_S) is engine.info
    assert refused.value.reason == "loading"
    assert told == [("load", 0.5)]


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
