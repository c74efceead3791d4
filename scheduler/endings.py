"""What becomes of requests that have their end."""

import asyncio
from collections.abc import Callable, Collection
from functools import partial

from mlxd.scheduler.config import ServerConfig
from mlxd.scheduler.errors import JournalError, RevokedError
from mlxd.scheduler.events import RequestKey
from mlxd.scheduler.journal import Journal
from mlxd.scheduler.open_streams import OpenStreams
from mlxd.scheduler.readers import Readers
from mlxd.scheduler.retention import Retention
from mlxd.scheduler.stream import Stream


class Endings:
    """Tells an end once the journal has it, and keeps it so that it can be told again.

    Runs on the asyncio thread.
    """

    def __init__(
        self,
        config: ServerConfig,
        streams: OpenStreams,
        readers: Readers,
        journal: Journal,
        on_closed: Callable[[Stream], None],
    ) -> None:
        """
        Args:
            streams: an ended one is taken out when its end is told.
            on_closed: told of each stream that is open no more.
        """
        self._open = streams
        self._readers = readers
        self._journal = journal
        self._on_closed = on_closed
        self._kept = Retention(config.retention_s, config.retention_bytes, self._forget)

    def get(self, key: RequestKey) -> Stream | None:
        """A stream that is kept."""
        return self._kept.get(key)

    def keep(self, stream: Stream, age_s: float) -> None:
        """`stream` ended in an earlier process."""
        stream.is_ended = True
        self._kept.add(stream, asyncio.get_running_loop().time() - age_s)

    def end(self, stream: Stream) -> None:
        """An open stream has its terminal message, or nobody wants it."""
        stream.answer = stream.message = None
        if stream.is_wanted and not stream.is_orphan:
            self._journal.end(stream.key, stream.transcript, partial(self._written, stream))
        else:
            self._journal.forget(stream.key)
            self._tell(stream)

    def _written(self, stream: Stream, failure: JournalError | None) -> None:
        # A client that waits for its answer gets it, even where the journal could not take it.
        if stream in self._open:
            self.tell_unwritten(stream)

    def tell_unwritten(self, stream: Stream) -> None:
        """Tell an end now, whether the journal has it or not."""
        if not stream.is_orphan:
            self._kept.add(stream, asyncio.get_running_loop().time())
        self._tell(stream)

    def _tell(self, stream: Stream) -> None:
        stream.is_ended = True
        self.close(stream)
        self._readers.tell(stream)

    def close(self, stream: Stream) -> None:
        """It is open no more."""
        self._open.remove(stream)
        self._on_closed(stream)

    def _forget(self, stream: Stream) -> None:
        self._journal.forget(stream.key)
        self._readers.dismiss(stream, "slow_client", "the client did not read its messages")

    def forget_others(self, tenants: Collection[str]) -> None:
        """Keep what these tenants have alone."""
        error = RevokedError()
        for stream in self._kept.take_others(tenants):
            self._readers.dismiss(stream, error.code, str(error))

    def expire(self, now: float) -> None:
        """Give up what was kept for its time."""
        self._kept.expire(now)
