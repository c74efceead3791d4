"""A runner that finds no memory, and the engine's loop over it, without threads and without a clock."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import count

from scheduling import Tape

from mlxd.batching.errors import OutOfMemoryError
from mlxd.batching.fake_runner import FakePendingStep, FakeRunner
from mlxd.batching.plan import StepPlan, StepResult
from mlxd.batching.runner import Runner
from mlxd.caches.disk_tier import DiskTier
from mlxd.caches.sizing import MemoryPlan
from mlxd.metrics.stats import EngineSnapshot
from mlxd.scheduler.config import Config
from mlxd.scheduler.events import Event, Finished, RequestKey, Tokens
from mlxd.scheduler.inbox import Command, Inbox, Stop
from mlxd.scheduler.loop import EngineLoop
from mlxd.scheduler.scheduler import Scheduler

REASON = "[malloc] Unable to allocate 1024 bytes."


class StarvedRunner(FakeRunner):
    """Memory runs out in some calls, after they did their work: launch, wait and export, counted from 0.

    Attributes:
        num_calls, num_failed: so far.
        on_failure: called at each.
        resets_fail: whether there is no memory for a reset either.
    """

    def __init__(self, memory: MemoryPlan | None, failing: Collection[int], **options: object) -> None:
        super().__init__(memory, **options)  # type: ignore[arg-type]
        self._failing = failing
        self._is_lost = False
        self.num_calls = self.num_failed = 0
        self.on_failure: Callable[[], None] = lambda: None
        self.resets_fail = False

    def launch(self, plan: StepPlan) -> FakePendingStep:
        assert not self._is_lost, "a launch before the reset"
        step = super().launch(plan)
        self._allocate()
        return step

    def _wait(self, plan: StepPlan, result: StepResult) -> StepResult:
        assert not self._is_lost, "a step was waited for that is lost"
        self._allocate()
        return super()._wait(plan, result)

    def export_pages(self, pages: Sequence[tuple[int, int]]) -> list[bytes]:
        assert not self._is_lost, "pages are saved whose content nobody knows"
        self._allocate()
        return super().export_pages(pages)

    def reset(self) -> None:
        if self.resets_fail:
            raise OutOfMemoryError(REASON)
        self._is_lost = False
        super().reset()

    def _allocate(self) -> None:
        number, self.num_calls = self.num_calls, self.num_calls + 1
        if number in self._failing:
            self._is_lost = True
            self.num_failed += 1
            self.on_failure()
            raise OutOfMemoryError(REASON)


class Script(Inbox):
    """Commands turn by turn; then, when nothing is open, Stop."""

    def __init__(self, turns: Sequence[Sequence[Command]]) -> None:
        super().__init__(0)
        self._turns = list(turns)

    def take(self, timeout_s: float | None) -> list[Command]:
        if self._turns:
            return list(self._turns.pop(0))
        return [Stop()] if timeout_s is None else []


@dataclass
class Play:
    """What came of a script.

    Attributes:
        failure: that ended the loop; empty where it went to its end.
        snapshots: `watch` saw each of them, too.
    """

    scheduler: Scheduler
    tape: Tape
    events: list[Event] = field(default_factory=list)
    snapshots: list[EngineSnapshot] = field(default_factory=list)
    failure: str = ""

    @property
    def ends(self) -> list[Finished]:
        return [event for event in self.events if isinstance(event, Finished)]

    def tokens(self, key: RequestKey) -> list[int]:
        mine = (event for event in self.events if isinstance(event, Tokens) and event.key == key)
        return [token for event in mine for token in event.token_ids]


def play(
    config: Config,
    runner: Runner,
    turns: Sequence[Sequence[Command]],
    *,
    disk: DiskTier | None = None,
    prepare: Callable[[Scheduler], None] = lambda scheduler: None,
    watch: Callable[[Scheduler], None] = lambda scheduler: None,
) -> Play:
    """Run the engine's loop over a script. `watch`: called with each snapshot."""
    tape = Tape()
    scheduler = Scheduler(config, runner.info, recorder=tape, disk=disk, secret=b"secret")
    played = Play(scheduler, tape)
    prepare(scheduler)

    def publish(snapshot: EngineSnapshot) -> None:
        played.snapshots.append(snapshot)
        watch(scheduler)

    ticks = count()
    loop = EngineLoop(
        runner,
        scheduler,
        Script(turns),
        recorder=tape,
        clock=lambda: next(ticks) / 1000,
        emit=played.events.extend,
        publish=publish,
    )
    try:
        loop.run()
    except OutOfMemoryError as error:
        played.failure = str(error)
        played.events += loop.abandon(played.failure)
    return played
