"""Whether the threads that requests depend on still work."""

import sys
import threading
import traceback

from mlxd.metrics.health import stalled_s, unseen_fault
from mlxd.scheduler.engine import Engine
from mlxd.scheduler.journal import JournalWriter, NoJournal


class Watchdog:
    """Looks from outside; whoever asks must be on another thread than those that are watched.

    Time that nobody looked for does not count: a process that was stopped, or whose machine slept, made no
    step either.

    Args:
        timeout_s: longest time that a step, or a write of the journal, may take, and a request wait to be
            looked at. Loading is not watched.
    """

    def __init__(self, engine: Engine, journal: JournalWriter | NoJournal, timeout_s: float) -> None:
        self._engine = engine
        self._journal = journal
        self._timeout_s = timeout_s
        self._looked_at = self._looking_since = engine.clock()

    def fault(self) -> str:
        """What hangs or is dead; "" where nothing is. To be called many times within `timeout_s`."""
        now = self._engine.clock()
        if now - self._looked_at > self._timeout_s / 2:
            self._looking_since = now
        self._looked_at = now
        return self._engine_fault(now) or self._journal_fault(now)

    def _engine_fault(self, now: float) -> str:
        snapshot = self._engine.snapshot
        if snapshot.state in ("failed", "stopped"):
            return ""
        if not self._engine.is_alive:
            # It may have told its end between the two looks.
            is_told = self._engine.snapshot.state in ("failed", "stopped")
            return "" if is_told else "the engine's thread ended without a word"
        watched_s, limit_s = now - self._looking_since, self._timeout_s
        still_s = min(stalled_s(snapshot, now), watched_s)
        if still_s > limit_s:
            return f"no step for {still_s:.1f} s (limit {limit_s:g} s)"
        unseen_s = min(self._engine.unseen_s(now), watched_s)
        return unseen_fault(unseen_s, limit_s) if unseen_s > limit_s else ""

    def _journal_fault(self, now: float) -> str:
        if not self._journal.is_alive:
            return "the journal's thread ended without a word"
        busy_s = min(self._journal.busy_s, now - self._looking_since)
        if busy_s > self._timeout_s:
            return f"the journal's write takes {busy_s:.1f} s (limit {self._timeout_s:g} s)"
        return ""


def stacks() -> str:
    """Where every thread of this process is, for the log."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame)))
    return "\n".join(parts)
