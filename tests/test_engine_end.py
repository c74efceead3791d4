"""The engine thread before it serves and after: loading, stopping and failing."""

import logging
import queue
import threading
from collections.abc import Iterator, Sequence

import pytest
from engine_harness import WAIT_S, MakeHarness, harnesses
from scheduling import fake_factory, make_config, submission

from mlxd.batching.errors import ModelError
from mlxd.batching.runner import Progress, Runner
from mlxd.scheduler.config import Config
from mlxd.scheduler.engine import Engine
from mlxd.scheduler.errors import (
    ClientTimeoutError,
    EngineFailedError,
    MlxdError,
    RejectedError,
)
from mlxd.scheduler.events import Accepted, Event, Finished, Rejected, Tokens
from mlxd.scheduler.inbox import Stop


@pytest.fixture
def make() -> Iterator[MakeHarness]:
    yield from harnesses()


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
