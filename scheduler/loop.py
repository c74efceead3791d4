"""What the engine thread does from a loaded runner to its end."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from mlxd.batching.errors import OutOfMemoryError
from mlxd.batching.runner import PendingStep, Runner
from mlxd.metrics.recorder import Recorder
from mlxd.metrics.stats import EngineSnapshot
from mlxd.scheduler.events import Event, Rejected, Submission
from mlxd.scheduler.inbox import Cancel, Command, Drain, Inbox, Pause, Ping, SetTenants, Stop, Unpause
from mlxd.scheduler.scheduler import Scheduler
from mlxd.scheduler.snapshot import SnapshotMaker

logger = logging.getLogger(__name__)

_STOPPED = "the daemon stopped"
_OUT_OF_MEMORY = "memory ran out in a step, and this request was the last to enter"
_LONGEST_WAIT_S = 0.5
"""Between two snapshots while requests wait for time to pass; well below the shortest `step_timeout_s`."""
_LAST_SAVES = 32
"""Times that pages are handed to the disk before the end: a second or two where it hangs."""


class _Launched(NamedTuple):
    step: PendingStep
    join_s: float


class EngineLoop:
    """Commands in, steps through the runner, events out.

    Step t+1 is launched before step t is read. A snapshot is published before the events of the same moment,
    and before the loop blocks with work it did not show yet: a step that hangs is seen as a step that hangs.

    Args:
        clock: monotonic seconds.
        emit: gets events in order, never an empty list.
        publish: gets each snapshot.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        inbox: Inbox,
        *,
        recorder: Recorder,
        clock: Callable[[], float],
        emit: Callable[[Sequence[Event]], None],
        publish: Callable[[EngineSnapshot], None],
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._inbox = inbox
        self._recorder = recorder
        self._clock = clock
        self._emit = emit
        self._publish = publish
        self._snapshots = SnapshotMaker(scheduler, runner)
        self._launched: deque[_Launched] = deque()
        self._events: list[Event] = []
        self._is_stopping = False
        self._last_step_at = 0.0
        self._busy_since = 0.0
        self._wakes_at: float | None = None
        self._num_failures = 0
        self._has_just_failed = False

    def run(self) -> None:
        """Until a Stop; then ends what is open and waits for the steps in flight: the runner may close."""
        self._tell("running")
        while not self._is_stopping:
            failure = _failure_of(self._turn)
            if failure is not None:
                self._start_over(failure)
        self._events += self._scheduler.end_all("draining", "draining", _STOPPED, self._clock())
        self._refuse_unseen(_STOPPED)
        self._tell(self._state)
        if _failure_of(self._finish_steps) is not None:
            self._launched.clear()
            logger.warning("out of memory at the end: the latest pages of prefixes are not on disk")
        self._tell("stopped")

    def _finish_steps(self) -> None:
        while self._launched:
            self._launched.popleft().step.wait()
        for _ in range(_LAST_SAVES):
            if not self._save_pages(is_idle=True):
                break

    def _start_over(self, failure: str) -> None:
        """Memory ran out. What the device holds is not known any more, so all of it is given up.

        Raises:
            OutOfMemoryError: it ran out again, before any step was read, and there is no row left to end;
                or a runner without rows finds no memory.
        """
        self._launched.clear()
        ended = self._scheduler.start_over("out_of_memory", _OUT_OF_MEMORY, self._clock(), self._events)
        if ended is None and self._has_just_failed:
            raise OutOfMemoryError(failure)
        self._num_failures += 1
        self._has_just_failed = True
        name = "none" if ended is None else f"{ended.tenant}/{ended.key.request_id}"
        logger.error("out of memory: %s ended=%s waiting=%d", failure, name, self._scheduler.num_waiting)
        self._runner.reset()
        self._tell(self._state)

    def abandon(self, error: str) -> list[Event]:
        """After `run` raised: every event that is still owed. Takes no more commands."""
        self._events += self._scheduler.abandon("engine_failed", error, self._clock())
        self._refuse_unseen(error)
        return self._events

    def _refuse_unseen(self, why: str) -> None:
        for command in self._inbox.close():
            if isinstance(command, Submission):
                self._recorder.rejected(command.key.tenant, "draining")
                self._events.append(Rejected(command.key, "draining", why, retryable=True))

    def _turn(self) -> None:
        commands = self._inbox.take(self._patience_s())
        for command in commands:
            self._obey(command)
        if self._is_stopping:
            return
        has_launched = self._launch()
        if commands or self._events:
            self._tell(self._state)
        if self._launched and (len(self._launched) > 1 or not has_launched):
            self._read_oldest()
            self._save_pages(is_idle=False)
            self._tell(self._state)
        elif not has_launched and self._scheduler.num_open:
            self._wait_for_time()

    def _patience_s(self) -> float | None:
        """How long the next command may be waited for; None: until it comes."""
        wakes_at, self._wakes_at = self._wakes_at, None
        if wakes_at is not None:
            return min(max(0.0, wakes_at - self._clock()), _LONGEST_WAIT_S)
        is_idle = not self._launched and self._scheduler.num_open == 0
        return None if is_idle and not self._rest() else 0.0

    def _wait_for_time(self) -> None:
        """Requests are open, and all are held back by a limit in time, or by their readers: no stall."""
        self._busy_since = now = self._clock()
        self._wakes_at = self._scheduler.wakes_at(now)
        if self._wakes_at is None:
            raise AssertionError(f"{self._scheduler.num_open} requests are open and no step can be planned")
        self._tell(self._state)

    @property
    def _state(self) -> str:
        return "draining" if self._scheduler.is_draining else "running"

    def _rest(self) -> bool:
        """Nothing is open: check that nothing leaked. Whether the runner has put-off work left."""
        self._scheduler.space.check_empty()
        return self._save_pages(is_idle=True) or self._runner.maintain()

    def _save_pages(self, *, is_idle: bool) -> bool:
        """Hand some pages to the disk; whether more are left."""
        return self._scheduler.space.save(self._runner.export_pages, is_idle=is_idle)

    def _obey(self, command: Command) -> None:
        now = self._clock()
        match command:
            case Submission():
                if self._scheduler.num_open == 0:
                    self._busy_since = now
                self._events.append(self._scheduler.submit(command))
            case Cancel():
                self._events += self._scheduler.cancel(command.key, command.outcome, now)
            case Pause():
                self._scheduler.paused.pause(command.key)
            case Unpause():
                self._scheduler.paused.unpause(command.key)
            case Ping():
                command.callback()
            case Drain():
                self._scheduler.is_draining = True
            case SetTenants():
                self._events += self._scheduler.set_tenants(command.tenants, now)
            case Stop():
                self._scheduler.is_draining = self._is_stopping = True

    def _launch(self) -> bool:
        """Plan and start a step, if there is one; its planning is the time its new rows took to join."""
        begun, num_entered = self._clock(), self._scheduler.batch.num_entered
        plan = self._scheduler.schedule(begun, self._events)
        if plan is None:
            return False
        has_joined = self._scheduler.batch.num_entered > num_entered
        join_s = self._clock() - begun if has_joined else 0.0
        self._launched.append(_Launched(self._runner.launch(plan), join_s))
        return True

    def _read_oldest(self) -> None:
        step, join_s = self._launched.popleft()
        result = step.wait()
        self._has_just_failed = False
        self._last_step_at = now = self._clock()
        stats = self._scheduler.postprocess(step.plan, result, now, self._events)
        if stats.joined or stats.left:
            leave_s = self._clock() - now if stats.left else 0.0
            stats = replace(stats, join_s=join_s, leave_s=leave_s)
        self._recorder.step(stats)

    def _tell(self, state: str) -> None:
        self._publish(
            self._snapshots.make(
                state=state,
                now=self._clock(),
                last_step_at=self._last_step_at,
                busy_since=self._busy_since,
                out_of_memory=self._num_failures,
            )
        )
        if self._events:
            events, self._events = self._events, []
            self._emit(events)


def _failure_of(action: Callable[[], None]) -> str | None:
    """What an OutOfMemoryError out of `action` says. With the error go the arrays that its frames hold."""
    try:
        action()
    except OutOfMemoryError as error:
        return str(error)
    return None
