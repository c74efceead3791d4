"""What peers are answered that send what they should not, and how much patience they meet."""

import asyncio
import math

from msgspec import UNSET

from mlxd.scheduler import messages as wire
from mlxd.scheduler.bad_frames import BadFrames
from mlxd.scheduler.door import Door
from mlxd.scheduler.errors import ProtocolError, UnauthenticatedError
from mlxd.scheduler.session import Session

LAST_WORDS_S = 0.2
"""Time for a message to go out before its connection is closed."""

_TOLD_STRANGERS = {"v", "routing_id"}
"""What a client must learn before it can say hello."""

_NOT_MESSAGES = {"malformed_frames", "decode", "too_large", "unsupported"}


class Refusals:
    """Runs on the asyncio thread."""

    def __init__(self, bad_frames: BadFrames) -> None:
        self._bad_frames = bad_frames
        self._loop = asyncio.get_running_loop()

    def refuse(self, door: Door, session: Session, error: ProtocolError) -> None:
        """Say what was wrong; a peer that goes on so is not heard for a while."""
        self._bad_frames.count(error.code)
        if error.code in _NOT_MESSAGES and not session.patience.take_bad_frame(self._loop.time()):
            error = ProtocolError("flood", "too many bad frames; nothing of this peer is read for a second")
        reply = wire.Error(
            id=error.request_id or UNSET,
            code=error.code,
            message=str(error),
            field=error.field or UNSET,
            about=error.about,
        )
        door.send(session, reply)

    def refuse_unread(self, door: Door, session: Session, error: ProtocolError) -> None:
        """For a frame that could not be read: a stranger learns no more than it must."""
        if session.tenant is None and error.field not in _TOLD_STRANGERS:
            self.refuse_stranger(door, session, error.code)
        else:
            self.refuse(door, session, error)

    def refuse_stranger(self, door: Door, session: Session, reason: str) -> None:
        """The same answer whatever was wrong, later with each attempt; one who sends much is shut then."""
        self._bad_frames.count(reason)
        delay = session.patience.take_failed_login(self._loop.time())
        reply = wire.Error(code="unauthenticated", message=str(UnauthenticatedError()))
        self._loop.call_later(delay, door.send, session, reply)
        if reason == "too_large":
            session.patience.deaf_until = math.inf
            self._loop.call_later(delay + LAST_WORDS_S, door.lose, session)
