"""The journal as the desk uses it: calls return at once, a thread of its own writes."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from mlxd.metrics.recorder import Recorder
from mlxd.scheduler.errors import JournalError
from mlxd.scheduler.events import RequestKey
from mlxd.scheduler.journal_file import Accept, Change, End, Entry, Forget, JournalFile, Start
from mlxd.scheduler.messages import Generate
from mlxd.scheduler.transcript import Transcript

logger = logging.getLogger(__name__)

Then = Callable[[JournalError | None], None]
"""Gets None once the disk has it."""

CLOSE_TIMEOUT_S = 5.0


class Journal(Protocol):
    """What is told of one request comes in the order accept, start, end, forget; never waits.

    Attributes:
        keeps: whether anything outlives the process.
    """

    keeps: bool

    @property
    def used_bytes(self) -> int:
        """What the file held after the latest write."""
        ...

    def accept(self, key: RequestKey, digest: bytes, message: Generate, then: Then) -> None: ...

    def start(self, key: RequestKey) -> None: ...

    def end(self, key: RequestKey, transcript: Transcript) -> None: ...

    def forget(self, key: RequestKey) -> None: ...


class NoJournal:
    """Nothing outlives the process."""

    keeps = False
    used_bytes = 0

    def take_entries(self) -> list[Entry]:
        return []

    def accept(self, key: RequestKey, digest: bytes, message: Generate, then: Then) -> None:
        then(None)

    def start(self, key: RequestKey) -> None:
        pass

    def end(self, key: RequestKey, transcript: Transcript) -> None:
        pass

    def forget(self, key: RequestKey) -> None:
        pass

    @property
    def is_alive(self) -> bool:
        return True

    @property
    def busy_s(self) -> float:
        return 0.0

    def age_s(self, entry: Entry) -> float:
        raise AssertionError("there are no entries")


class JournalWriter:
    """All that waits is written in one transaction: the busier, the more requests share a disk's sync.

    An acceptance that cannot be written is told to whoever waits for it. Another change that cannot is
    logged: its request runs again after a restart, and ends as it did.
    """

    keeps = True

    def __init__(
        self,
        file: JournalFile,
        on_loop: Callable[[Callable[[], None]], None],
        recorder: Recorder,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Reads the file, then owns it. `on_loop`: calls back on the thread that `Then`s belong to.

        Raises:
            ConfigError: something in the file cannot be read.
        """
        self._entries = file.load()
        self.used_bytes = file.used_bytes
        self._busy_since: float | None = None
        self._file = file
        self._on_loop = on_loop
        self._recorder = recorder
        self._wall_clock = wall_clock
        self._waiting: queue.SimpleQueue[tuple[Change, Then] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mlxd-journal", daemon=True)
        self._thread.start()

    def take_entries(self) -> list[Entry]:
        """What the file had at the start; told once."""
        entries, self._entries = self._entries, []
        return entries

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def busy_s(self) -> float:
        """How long the write at work has taken so far; 0 between two writes."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def accept(self, key: RequestKey, digest: bytes, message: Generate, then: Then) -> None:
        def on_loop(error: JournalError | None) -> None:
            self._on_loop(lambda: then(error))

        self._waiting.put((Accept(key, digest, message), on_loop))

    def start(self, key: RequestKey) -> None:
        self._waiting.put((Start(key), _log))

    def end(self, key: RequestKey, transcript: Transcript) -> None:
        self._waiting.put((End(key, transcript.record(), self._wall_clock()), _log))

    def forget(self, key: RequestKey) -> None:
        self._waiting.put((Forget(key), _log))

    def age_s(self, entry: Entry) -> float:
        """Seconds since it ended, by the wall clock; at least 0."""
        return max(0.0, self._wall_clock() - entry.ended_at)

    def close(self) -> bool:
        """Write what waits; False: that takes longer than CLOSE_TIMEOUT_S."""
        self._waiting.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        is_closing = False
        while not is_closing:
            batch = [self._waiting.get()]
            while not self._waiting.empty():
                batch.append(self._waiting.get())
            changes = [item for item in batch if item is not None]
            is_closing = len(changes) < len(batch)
            self._busy_since = begun = time.monotonic()
            num_written = self._write(changes)
            self.used_bytes = self._file.used_bytes
            self._busy_since = None
            self._recorder.journal(num_written, len(changes) - num_written, time.monotonic() - begun)
        self._file.close()

    def _write(self, changes: list[tuple[Change, Then]]) -> int:
        """Together, or where that fails one by one: a full disk may take some of them. How many it took."""
        try:
            self._file.write([change for change, _ in changes])
        except JournalError as error:
            if len(changes) > 1:
                return sum(self._write([change]) for change in changes)
            changes[0][1](error)
            return 0
        for _, then in changes:
            then(None)
        return len(changes)


def _log(error: JournalError | None) -> None:
    if error is not None:
        logger.warning("journal: a change was not written: %s", error)
