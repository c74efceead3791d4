"""Requests that only time lets go on, or ends."""

import queue
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from scheduling import VOCAB, Tape, make_config, make_tenant, submission

from mlxd.batching.fake_runner import FakeRunner, fake_memory
from mlxd.metrics.health import judge
from mlxd.scheduler.engine import Engine
from mlxd.scheduler.events import Event, Finished, Submission

WAIT_S = 10.0


class Served:
    """An engine whose only tenant may use ten tokens a second, and a minute's worth at once."""

    def __init__(self) -> None:
        runner = FakeRunner(fake_memory(max_model_len=1024), vocab_size=VOCAB)
        config = make_config(make_tenant("acme", tokens_per_minute=600))
        self.tape = Tape()
        self.engine = Engine(config, runner_factory=lambda *_: runner, recorder=self.tape, seed=0)
        self._batches: queue.SimpleQueue[Sequence[Event]] = queue.SimpleQueue()
        self.engine.start(self._batches.put)
        self.engine.wait_ready(WAIT_S)

    def submit(self, name: str, num_prompt: int, deadline_s: float | None = None) -> float:
        now = self.engine.clock()
        made: Submission = submission(name, (1,) * num_prompt, at=now, max_tokens=5)
        self.engine.submit(replace(made, deadline=None if deadline_s is None else now + deadline_s))
        return now

    def end(self) -> Finished:
        while True:
            for event in self._batches.get(timeout=WAIT_S):
                if isinstance(event, Finished):
                    return event


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    assert made.engine.stop(WAIT_S)


def test_a_tenant_out_of_tokens_is_served_when_there_are_enough(served: Served) -> None:
    served.submit("all", 595)
    served.end()
    begun = served.submit("next", 1)
    assert served.end().key.request_id == "next"
    assert 0.3 < served.engine.clock() - begun < 5.0


def test_waiting_for_time_is_told_and_is_no_stall(served: Served) -> None:
    served.submit("all", 595)
    served.end()
    served.submit("late", 200)
    while not served.engine.snapshot.waiting:
        pass
    snapshot = served.engine.snapshot
    assert snapshot.fairness.waits == {"tokens_per_minute": 1}
    assert snapshot.busy_since >= snapshot.last_step_at
    assert judge(snapshot, served.engine.clock()).ok


def test_a_deadline_ends_a_request_while_nothing_is_computed(served: Served) -> None:
    served.submit("all", 595)
    served.end()
    begun = served.submit("late", 200, deadline_s=0.2)
    end = served.end()
    assert (end.outcome, end.error_code) == ("expired", "expired")
    assert 0.2 <= served.engine.clock() - begun < 5.0
    assert [stats.outcome for stats in served.tape.requests] == ["length", "expired"]
