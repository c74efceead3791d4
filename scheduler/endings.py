"""What becomes of requests at their end."""

import asyncio
from collections.abc import Callable, Collection
from functools import partial

from mlxd.scheduler import messages as wire
from mlxd.scheduler.answer import terminal_of
from mlxd.scheduler.config import ServerConfig
from mlxd.scheduler.errors import JournalError, MlxdError, RequestFailedError, RevokedError
from mlxd.scheduler.events import Finished, RequestKey, Usage
from mlxd.scheduler.journal import Journal
from mlxd.scheduler.open_streams import OpenStreams
from mlxd.scheduler.readers import Readers
from mlxd.scheduler.replies import reply_of
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
        self._kept.add(stream, _now() - age_s)

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
            self._keep_and_tell(stream)

    def _keep_and_tell(self, stream: Stream) -> None:
        if not stream.is_orphan:
            self._kept.add(stream, _now())
        self._tell(stream)

    def _tell(self, stream: Stream) -> None:
        stream.is_ended = True
        self._close(stream)
        self._readers.tell(stream)

    def _close(self, stream: Stream) -> None:
        self._open.remove(stream)
        self._on_closed(stream)

    def refuse(self, stream: Stream, reply: wire.Rejected | wire.Error) -> None:
        """In place of accepted; the id is free again. What was accepted already ends with an error."""
        if not stream.is_accepted:
            self._turn_away(stream, reply)
        elif isinstance(reply, wire.Rejected):
            self.fail(stream, reply.reason, reply.message)
        else:
            self.fail(stream, reply.code, reply.message)

    def fail(self, stream: Stream, code: str, message: str) -> None:
        """An accepted one ends with an error."""
        stream.transcript.terminal = wire.Error(id=stream.key.request_id, code=code, message=message)
        self.end(stream)

    def _turn_away(self, stream: Stream, reply: wire.Terminal) -> None:
        self._close(stream)
        self._readers.reply(stream, reply)
        stream.detach()

    def end_unbegun(self, stream: Stream) -> None:
        """One that the engine does not have ends as `stream.end_as` says."""
        error: MlxdError = RevokedError()
        if stream.end_as == "expired":
            text = f"the deadline passed after {_now() - stream.arrived_at:.3f} s"
            error = RequestFailedError("expired", text)
        event = Finished(stream.key, stream.end_as, Usage(0, 0), error.code, str(error))
        terminal = terminal_of(event)
        if stream.is_accepted:
            stream.transcript.terminal = terminal
            self.end(stream)
        else:
            self._turn_away(stream, terminal)

    def give_up(self, error: MlxdError) -> None:
        """End what has no end yet, and will not get one from the engine any more."""
        for stream in self._open:
            if stream.transcript.terminal is None:
                self._refuse_unwritten(stream, error)

    def tell_unwritten(self) -> None:
        """Tell the ends that wait for a journal which does not answer any more."""
        for stream in self._open:
            if stream.is_accepted:
                self._keep_and_tell(stream)
            else:
                error = JournalError("journal_failed", "the daemon stopped before the journal answered")
                self._refuse_unwritten(stream, error)

    def _refuse_unwritten(self, stream: Stream, error: MlxdError) -> None:
        if not stream.is_accepted:
            self._journal.forget(stream.key)
        self.refuse(stream, reply_of(error, stream.key.request_id))

    def forget_others(self, tenants: Collection[str]) -> None:
        """Keep what these tenants have alone."""
        error = RevokedError()
        for stream in self._kept.take_others(tenants):
            self._readers.dismiss(stream, error.code, str(error))

    def _forget(self, stream: Stream) -> None:
        self._journal.forget(stream.key)
        self._readers.dismiss(stream, "slow_client", "the client did not read its messages")

    def expire(self, now: float) -> None:
        """Give up what was kept for its time."""
        self._kept.expire(now)


def _now() -> float:
    return asyncio.get_running_loop().time()
