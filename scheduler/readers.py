"""From streams to the connections that read them."""

import asyncio
from collections.abc import Callable

import msgspec

from mlxd.scheduler import messages as wire
from mlxd.scheduler.open_streams import OpenStreams
from mlxd.scheduler.pauses import Pauses
from mlxd.scheduler.session import Session
from mlxd.scheduler.stream import Stream

MAX_CHUNK_BYTES = 2**16
"""More unsent text than this is told in several chunks."""


class Readers:
    """Sends each stream as far as its reader has room and gave credit; runs on the asyncio thread."""

    def __init__(
        self,
        send: Callable[[Session, wire.ServerMessage], int],
        streams: OpenStreams,
        pauses: Pauses,
        max_unread_bytes: int,
    ) -> None:
        """
        Args:
            send: must not block; returns the frame's bytes.
            streams: told which of them have no reader.
            pauses: told of each stream whose reader may have got more, or be more behind.
            max_unread_bytes: of one connection; several chunks fit.
        """
        self._send = send
        self._streams = streams
        self._pauses = pauses
        self._max_chunk_bytes = min(MAX_CHUNK_BYTES, max_unread_bytes // 4)

    def attach(self, stream: Stream, session: Session, seq: int, credit: int | msgspec.UnsetType) -> None:
        """Tell `session` from piece `seq` on, in place of whom it was told before."""
        earlier = stream.session
        if earlier is not None and earlier is not session:
            self.dismiss(stream, "taken_over", "another connection reads this request now")
        self._streams.found_reader(stream)
        stream.attach(session, seq, credit)
        if stream.is_accepted:
            self.reply(stream, wire.Accepted(id=stream.key.request_id))
            self.tell(stream)

    def grant(self, stream: Stream, session: Session, num_bytes: int) -> None:
        """Let more bytes out, where `session` reads the stream and gave credit before."""
        if stream.session is session and stream.credit is not None:
            stream.credit = min(stream.credit + num_bytes, wire.MAX_CREDIT)
            self.tell(stream)

    def lose(self, stream: Stream) -> None:
        """Its reader is gone."""
        stream.detach()
        self._streams.lost_reader(stream, _now())
        self._pauses.update(stream, _now())

    def dismiss(self, stream: Stream, code: str, message: str) -> None:
        """The reader, if there is one, gets an error in place of the rest."""
        session = stream.session
        stream.detach()
        if session is not None:
            self._send(session, wire.Error(id=stream.key.request_id, code=code, message=message))

    def tell(self, stream: Stream) -> None:
        """Send what may be sent now; with the terminal message it is read."""
        while (session := stream.session) is not None and stream.is_accepted:
            message = stream.next_message(0 if session.outbox else self._max_chunk_bytes)
            if message is None:
                break
            if not isinstance(message, wire.Chunk):
                stream.detach()
            stream.sent_at = _now()
            stream.sent(message, self._send(session, message))
        self._pauses.update(stream, _now())

    def reply(self, stream: Stream, message: wire.ServerMessage) -> None:
        """Send something that is no part of the answer."""
        if stream.session is not None:
            stream.sent_at = _now()
            self._send(stream.session, message)

    def keep_alive(self, stream: Stream, quiet_since: float) -> None:
        """Show a reader who got nothing since then, and left nothing unread, that its request is known."""
        if stream.sent_at <= quiet_since and stream.session is not None and not stream.session.outbox:
            self.reply(stream, wire.KeepAlive(id=stream.key.request_id, state=stream.state))


def _now() -> float:
    return asyncio.get_running_loop().time()
