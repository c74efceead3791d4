"""Whether the threads that requests depend on still work."""

import sys
import threading
import traceback

from mlxd.metrics.health import stalled_s
from mlxd.scheduler.engine import Engine
from mlxd.scheduler.journal import JournalWriter, NoJournal


class Watchdog:
    """Looks from outside; whoever asks must be on another thread than those that are watched.

    Args:
        timeout_s: longest time that a step, or a write of the journal, may take. Loading is not watched.
    """

    def __init__(self, engine: Engine, journal: JournalWriter | NoJournal, timeout_s: float) -> None:
        self._engine = engine
        self._journal = journal
        self._timeout_s = timeout_s

    def fault(self) -> str:
        """What hangs or is dead; "" where nothing is."""
        return self._engine_fault() or self._journal_fault()

    def _engine_fault(self) -> str:
        snapshot = self._engine.snapshot
        if snapshot.state in ("failed", "stopped"):
            return ""
        if not self._engine.is_alive:
            # It may have told its end between the two looks.
            is_told = self._engine.snapshot.state in ("failed", "stopped")
            return "" if is_told else "the engine's thread ended without a word"
        still_s = stalled_s(snapshot, self._engine.clock())
        return (
            f"no step for {still_s:.1f} s (limit {self._timeout_s:g} s)" if still_s > self._timeout_s else ""
        )

    def _journal_fault(self) -> str:
        if not self._journal.is_alive:
            return "the journal's thread ended without a word"
        busy_s = self._journal.busy_s
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
