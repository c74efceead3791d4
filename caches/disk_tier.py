"""Pages of prefixes on disk: written behind the engine's back, verified when they are read."""

import logging
from collections.abc import Callable, Iterable
from threading import Condition, Thread

from mlxd.caches.disk_store import DiskStore
from mlxd.caches.persistence import PageCodec, PageFileError, PageName, file_of
from mlxd.metrics.stats import DiskStats

logger = logging.getLogger(__name__)

_QUEUE_BYTES = 256 * 2**20
_FEWEST_QUEUED = 2
_FADING = 0.9
_CLOSE_S = 5.0


class DiskTier:
    """Loads on the engine thread, saves on a thread of its own; both give way rather than hold anybody up.

    A disk that fails turns the tier off with one warning: then nothing is found and nothing is stored. All
    methods are the engine thread's.

    Attributes:
        is_off: the disk failed.
        namespaces: of those whose pages they are.
    """

    def __init__(
        self,
        store: DiskStore,
        codec: PageCodec,
        *,
        clock: Callable[[], float],
        step_s: float,
        queue_bytes: int = _QUEUE_BYTES,
    ) -> None:
        """
        Args:
            store: closed with the tier.
            clock: seconds.
            step_s: no further page is loaded for a step once loading took so long.
            queue_bytes: of pages that wait to be written; two may always wait.
        """
        self.is_off = False
        self.namespaces = store.namespaces
        self._store = store
        self._codec = codec
        self._clock = clock
        self._step_s = step_s
        self._spent_s = 0.0
        self._page_s = 0.0
        self._limit = max(_FEWEST_QUEUED, queue_bytes // max(format.page_bytes for format in codec.formats))
        self._queue: dict[bytes, tuple[PageName, bytes]] = {}
        self._queue_changed = Condition()
        self._is_closing = False
        self._load_s = self._save_s = 0.0
        self._pages = dict.fromkeys(("saved", "loaded", "dropped"), 0)
        self._misses = dict.fromkeys(("absent", "truncated", "corrupt", "foreign", "slow", "busy"), 0)
        self._writer = Thread(target=self._write_behind, name="mlxd-disk", daemon=True)
        self._writer.start()

    def __contains__(self, name: object) -> bool:
        """Whether the page is stored, or is about to be."""
        return isinstance(name, PageName) and (name.file in self._store or name.file in self._queue)

    @property
    def stats(self) -> DiskStats:
        return DiskStats(
            used_bytes=self._store.used_bytes,
            capacity_bytes=self._store.max_bytes,
            pages=self._pages | {"evicted": self._store.num_evicted},
            misses=dict(self._misses),
            load_s=self._load_s,
            save_s=self._save_s,
            num_stored=len(self._store),
            is_off=self.is_off,
        )

    def begin_step(self) -> None:
        """Pages may be loaded for as long again."""
        self._spent_s = 0.0

    def load(self, name: PageName, worth_s: float) -> memoryview | None:
        """A page's planes, verified; None, and counted as a miss, where they are not to be had.

        What is stored under that name and is not that page is removed.

        Args:
            worth_s: time it takes to compute the page; a disk that was slower lately is not asked.
        """
        if self.is_off:
            return None
        reason = self._why_not(name, worth_s)
        if reason:
            self._misses[reason] += 1
            return None
        begun = self._clock()
        payload = self._read(name)
        seconds = self._clock() - begun
        self._spent_s += seconds
        self._load_s += seconds
        if payload is not None:
            self._page_s = seconds if not self._pages["loaded"] else (self._page_s + seconds) / 2
            self._pages["loaded"] += 1
        return payload

    def _why_not(self, name: PageName, worth_s: float) -> str:
        """The miss that it is without reading; empty: read it."""
        if name not in self:
            return "absent"
        if self._spent_s >= self._step_s:
            return "busy"
        if self._page_s > worth_s:
            self._page_s *= _FADING  # so that it is tried again some time
            return "slow"
        return ""

    def _read(self, name: PageName) -> memoryview | None:
        queued = self._queue.get(name.file)
        if queued is not None:
            return memoryview(queued[1])
        data = self._store.read(name.file)
        if data is None:
            self._misses["absent"] += 1
            return None
        try:
            return self._codec.decode(name, data)
        except PageFileError as error:
            logger.warning(
                "page removed from disk key=%s reason=%s: %s", name.file.hex(), error.reason, error
            )
            self._store.remove(name.file)
            self._misses[error.reason] += 1
            return None

    def count_absent(self) -> None:
        """More was looked for than is stored."""
        self._misses["absent"] += 1

    def touch(self, names: Iterable[PageName]) -> None:
        """These are in use, the last one most."""
        if not self.is_off:
            for name in names:
                self._store.touch(name.file)

    def room(self, wait_s: float = 0.0) -> int:
        """Pages that may be saved now; waits at most `wait_s` for there to be any."""
        with self._queue_changed:
            self._queue_changed.wait_for(lambda: len(self._queue) < self._limit, wait_s)
            return max(0, self._limit - len(self._queue))

    def save(self, name: PageName, payload: bytes) -> None:
        """Have a page written; dropped, and counted, where there is no room."""
        with self._queue_changed:
            if self.is_off or len(self._queue) >= self._limit:
                self._pages["dropped"] += 1
                return
            self._queue[name.file] = name, payload
            self._queue_changed.notify_all()

    def remove(self, keys: Iterable[bytes]) -> None:
        """Never find the pages of these keys again, of no group."""
        for key in keys:
            for group in range(len(self._codec.formats)):
                file = file_of(key, group)
                with self._queue_changed:
                    self._queue.pop(file, None)
                self._store.remove(file)

    def close(self) -> None:
        """Write what waits, for a while, and give the folder up."""
        with self._queue_changed:
            self._is_closing = True
            self._queue_changed.notify_all()
        self._writer.join(_CLOSE_S)
        if self._writer.is_alive():
            logger.warning("pages are still being written after %.0f s; they are given up", _CLOSE_S)
        else:
            self._store.close()

    def _write_behind(self) -> None:
        while (page := self._next()) is not None:
            name, payload = page
            begun = self._clock()
            try:
                is_stored = self._store.write(name.file, self._codec.encode(name, payload))
            except OSError as error:
                self._turn_off(error)
                continue
            self._save_s += self._clock() - begun
            self._finish(page, is_stored)

    def _next(self) -> tuple[PageName, bytes] | None:
        """The page that waits longest; it stays in the queue. None: there is none and none will come."""
        with self._queue_changed:
            self._queue_changed.wait_for(lambda: bool(self._queue) or self._is_closing)
            return next(iter(self._queue.values()), None)

    def _finish(self, page: tuple[PageName, bytes], is_stored: bool) -> None:
        file = page[0].file
        with self._queue_changed:
            if self._queue.get(file) is not page:
                self._store.remove(file)  # dropped since; a new one of that name may wait
            else:
                del self._queue[file]
                self._pages["saved" if is_stored else "dropped"] += 1
            self._queue_changed.notify_all()

    def _turn_off(self, error: OSError) -> None:
        with self._queue_changed:
            self.is_off = True
            self._pages["dropped"] += len(self._queue)
            self._queue.clear()
            self._queue_changed.notify_all()
        logger.warning("the disk tier is off: %s", error)
