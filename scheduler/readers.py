"""From streams to the connections that read them."""

import asyncio
from collections.abc import Callable

import msgspec

from mlxd.scheduler import messages as wire
from mlxd.scheduler.session import Session
from mlxd.scheduler.stream import Stream


class Readers:
    """Sends each stream as far as its reader has room and gave credit; runs on the asyncio thread."""

    def __init__(self, send: Callable[[Session, wire.ServerMessage], int]) -> None:
        """`send` must not block; it returns the frame's bytes."""
        self._send = send

    def attach(self, stream: Stream, session: Session, seq: int, credit: int | msgspec.UnsetType) -> None:
        """Tell `session` from piece `seq` on, in place of whom it was told before."""
        earlier = stream.session
        if earlier is not None and earlier is not session:
            self.dismiss(stream, "taken_over", "another connection reads this request now")
        stream.attach(session, seq, credit)
        if stream.is_accepted:
            self.reply(stream, wire.Accepted(id=stream.key.request_id))
            self.tell(stream)

    def dismiss(self, stream: Stream, code: str, message: str) -> None:
        """The reader, if there is one, gets an error in place of the rest."""
        session = stream.session
        stream.detach()
        if session is not None:
            self._send(session, wire.Error(id=stream.key.request_id, code=code, message=message))

    def tell(self, stream: Stream) -> None:
        """Send what may be sent now; with the terminal message it is read."""
        while (session := stream.session) is not None and stream.is_accepted:
            message = stream.next_message(has_room=not session.outbox)
            if message is None:
                return
            if not isinstance(message, wire.Chunk):
                stream.detach()
            stream.sent_at = _now()
            stream.sent(message, self._send(session, message))

    def reply(self, stream: Stream, message: wire.ServerMessage) -> None:
        """Send something that is no part of the answer."""
        if stream.session is not None:
            stream.sent_at = _now()
            self._send(stream.session, message)

    def keep_alive(self, stream: Stream, quiet_since: float) -> None:
        """Show a reader who got nothing since then that its request is known."""
        if stream.sent_at <= quiet_since:
            self.reply(stream, wire.KeepAlive(id=stream.key.request_id, state=stream.state))


def _now() -> float:
    return asyncio.get_running_loop().time()
