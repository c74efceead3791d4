"""The journal as the desk uses it: calls return at once, a thread of its own writes."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from typing import Protocol

from mlxd.caches.budget import parse_size
from mlxd.metrics.recorder import Recorder
from mlxd.scheduler.config import Config
from mlxd.scheduler.errors import JournalError
from mlxd.scheduler.events import RequestKey
from mlxd.scheduler.journal_entries import Accept, Begun, Change, End, Entry, Forget, Keep, Start
from mlxd.scheduler.journal_file import JournalFile
from mlxd.scheduler.journal_room import JournalUsage
from mlxd.scheduler.messages import Generate
from mlxd.scheduler.transcript import Transcript

logger = logging.getLogger(__name__)

Then = Callable[[JournalError | None], None]
"""Gets None once the disk has it."""

CLOSE_TIMEOUT_S = 5.0
WARNING_INTERVAL_S = 10.0


class Journal(Protocol):
    """What is told of one request comes in the order accept, start, end, forget; never waits.

    Attributes:
        keeps: whether anything outlives the process.
        usage: what the file held after the latest write.
    """

    keeps: bool
    usage: JournalUsage

    def take_entries(self) -> list[Entry]:
        """What there was at the start; told once."""
        ...

    def age_s(self, entry: Entry) -> float:
        """Seconds since it ended, by the wall clock; at least 0."""
        ...

    def accept(self, key: RequestKey, digest: bytes, message: Generate, then: Then) -> None: ...

    def start(self, key: RequestKey, begun: Begun, then: Then) -> None: ...

    def end(self, key: RequestKey, transcript: Transcript, then: Then) -> None: ...

    def forget(self, key: RequestKey) -> None: ...

    def keep(self, tenants: Collection[str]) -> None:
        """Forget what other tenants have; the room is shared out to these."""
        ...


class NoJournal:
    """Nothing outlives the process."""

    keeps = False
    is_alive = True
    busy_s = 0.0
    num_untold = 0
    usage = JournalUsage({}, 0)

    def take_entries(self) -> list[Entry]:
        return []

    def age_s(self, entry: Entry) -> float:
        raise AssertionError("there are no entries")

    def accept(self, key: RequestKey, digest: bytes, message: Generate, then: Then) -> None:
        then(None)

    def start(self, key: RequestKey, begun: Begun, then: Then) -> None:
        then(None)

    def end(self, key: RequestKey, transcript: Transcript, then: Then) -> None:
        then(None)

    def forget(self, key: RequestKey) -> None:
        pass

    def keep(self, tenants: Collection[str]) -> None:
        pass

    def close(self) -> bool:
        return True


class JournalWriter:
    """All that waits is written in one transaction: the busier, the more requests share a disk's sync.

    Whoever waits for a change is told if it cannot be written. An end that cannot is logged, too: its request
    runs again after a restart, and ends as it did.

    Attributes:
        num_untold: changes whose `Then` was not called yet.
    """

    keeps = True

    def __init__(
        self,
        file: JournalFile,
        tenants: Collection[str],
        on_loop: Callable[[Callable[[], None]], None],
        recorder: Recorder,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Reads the file, then owns it.

        Args:
            tenants: what others have in it is forgotten.
            on_loop: calls back on the thread that all calls come from.
        Raises:
            SettingError: something in the file cannot be read.
        """
        self._entries = [entry for entry in file.load() if entry.key.tenant in tenants]
        self.usage = file.usage
        self._busy_since: float | None = None
        self._quiet_until = 0.0
        self._file = file
        self._on_loop = on_loop
        self._recorder = recorder
        self._wall_clock = wall_clock
        self._waiting: queue.SimpleQueue[tuple[Change, Then] | None] = queue.SimpleQueue()
        self.num_untold = 0
        self.keep(tenants)
        self._thread = threading.Thread(target=self._run, name="mlxd-journal", daemon=True)
        self._thread.start()

    def take_entries(self) -> list[Entry]:
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

    def age_s(self, entry: Entry) -> float:
        return max(0.0, self._wall_clock() - entry.ended_at)

    def accept(self, key: RequestKey, digest: bytes, message: Generate, then: Then) -> None:
        self._put(Accept(key, digest, message), then)

    def start(self, key: RequestKey, begun: Begun, then: Then) -> None:
        self._put(Start(key, begun), then)

    def end(self, key: RequestKey, transcript: Transcript, then: Then) -> None:
        self._put(End(key, transcript.record(), self._wall_clock()), then)

    def _put(self, change: Change, then: Then) -> None:
        def tell(error: JournalError | None) -> None:
            self.num_untold -= 1
            then(error)

        self.num_untold += 1
        self._waiting.put((change, lambda error: self._on_loop(lambda: tell(error))))

    def forget(self, key: RequestKey) -> None:
        self._waiting.put((Forget(key), _nobody_waits))

    def keep(self, tenants: Collection[str]) -> None:
        self._waiting.put((Keep(frozenset(tenants)), _nobody_waits))

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
            self._busy_since = None
            self._recorder.journal(num_written, len(changes) - num_written, time.monotonic() - begun)
        self._file.close()

    def _write(self, changes: list[tuple[Change, Then]]) -> int:
        """Together, or where that fails one by one: a full disk may take some of them. How many it took."""
        try:
            errors = self._file.write([change for change, _ in changes])
            self.usage = self._file.usage
        except JournalError as error:
            if len(changes) > 1:
                return sum(self._write([change]) for change in changes)
            errors = [error]
        for (change, then), failure in zip(changes, errors, strict=True):
            if failure is not None and not isinstance(change, Accept):
                self._warn(change, failure)
            then(failure)
        return errors.count(None)

    def _warn(self, change: Change, failure: JournalError) -> None:
        """One line an interval: on a full disk every request would have its own. Metrics count them all."""
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + WARNING_INTERVAL_S
            logger.warning("journal: a change was not written (%s): %s", type(change).__name__, failure)


def _nobody_waits(error: JournalError | None) -> None:
    pass


def open_journal(
    config: Config, on_loop: Callable[[Callable[[], None]], None], recorder: Recorder
) -> JournalWriter | NoJournal:
    """The configured one. Raises SettingError where its file cannot be used."""
    settings = config.journal
    if settings.durability == "none" or settings.path is None:
        return NoJournal()
    max_bytes = parse_size(settings.max_bytes)
    file = JournalFile(settings.path, fsync=settings.fsync == "always", max_bytes=max_bytes)
    tenants = [tenant.name for tenant in config.tenants]
    return JournalWriter(file, tenants, on_loop, recorder)
