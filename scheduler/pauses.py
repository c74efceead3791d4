"""Requests that wait for their readers."""

from mlxd.scheduler.engine import Engine
from mlxd.scheduler.open_streams import OpenStreams
from mlxd.scheduler.stream import Stream


class Pauses:
    """Has the engine pause an open request whose reader is behind; runs on the asyncio thread.

    It pauses with more than half of `max_unread_bytes` unread, and goes on with a quarter or less: so what it
    computes again is at most once for each quarter that is read.
    """

    def __init__(self, engine: Engine, streams: OpenStreams, max_unread_bytes: int) -> None:
        """`max_unread_bytes`: of one request; the half above the bound is for tokens in flight."""
        self._engine = engine
        self._streams = streams
        self._pause_above = max_unread_bytes // 2
        self._unpause_at = max_unread_bytes // 4

    def update(self, stream: Stream, now: float) -> None:
        """`stream` grew, was read or has another reader. Nothing where it ends, or others wait for that."""
        has_ended = stream.end_as or stream.transcript.terminal is not None or stream not in self._streams
        if has_ended or stream.is_alone:
            return
        unread_bytes = stream.unread_bytes
        if stream.state == "paused":
            if unread_bytes <= self._unpause_at:
                stream.state = "waiting"
                self._streams.paused.discard(stream)
                self._engine.unpause(stream.key)
        elif unread_bytes > self._pause_above:
            stream.state = "paused"
            self._streams.paused.add(stream, now)
            self._engine.pause(stream.key)
