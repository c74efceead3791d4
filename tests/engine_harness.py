"""Engines on fake runners, and their events."""

import queue
from collections.abc import Callable, Iterator, Sequence

from scheduling import VOCAB, Tape, make_config

from mlxd.batching.fake_runner import FakeRunner, fake_memory
from mlxd.batching.runner import Progress, Runner
from mlxd.scheduler.config import Config
from mlxd.scheduler.engine import Engine
from mlxd.scheduler.events import Event, Finished

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


MakeHarness = Callable[..., Harness]


def harnesses() -> Iterator[MakeHarness]:
    """Yields what makes them, once; then stops them all."""
    made: list[Harness] = []

    def build(config: Config | None = None, **runner: object) -> Harness:
        made.append(Harness(config, **runner))
        return made[-1]

    yield build
    for harness in made:
        harness.runner.resume.set()
        assert harness.engine.stop(WAIT_S)
