"""Who is connected to a ROUTER socket, from accept to close, as libzmq's monitor tells it."""

import asyncio
import ctypes
import secrets
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

import zmq
import zmq.asyncio

from mlxd.scheduler.session import Session

_HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED
_EVENT = struct.Struct("=HI")
_AUTO_ID_BYTES = 5


def is_own_id(peer: bytes) -> bool:
    """Whether the peer set its routing id itself; those of libzmq are a NUL and a count."""
    return len(peer) != _AUTO_ID_BYTES or peer[0] != 0


def _is_later(peer: bytes, other: bytes) -> bool:
    """Whether libzmq gave `peer` to a later connection than `other`; its count wraps at 32 bits.

    An id of a peer's own making comes before all others: whoever has one is served nothing.
    """
    if is_own_id(peer) or is_own_id(other):
        return not is_own_id(peer)
    distance = int.from_bytes(peer[1:], "big") - int.from_bytes(other[1:], "big")
    return 0 < distance % 2**32 < 2**31


def scatter_ids() -> None:
    """Let the routing ids of the next ROUTER begin at a number that nobody can tell.

    libzmq takes it from C's `rand`, which nobody seeds, and aborts where a peer claimed the next one first.
    """
    ctypes.CDLL(None).srand(secrets.randbits(32))


class Connections:
    """One session a connection. A routing id says nothing: the next connection may claim it.

    `on_closed` is called for each session whose connection is closed, `on_failed_handshake` for each
    connection that never got so far as a message; on the loop's thread, which owns this.
    """

    def __init__(
        self,
        router: zmq.asyncio.Socket,
        max_strangers: int,
        on_closed: Callable[[Session], None],
        on_failed_handshake: Callable[[], None],
        *,
        encrypted: bool = False,
    ) -> None:
        """To be made before `router` is bound, inside the running loop. `encrypted`: it speaks CURVE."""
        self._encrypted = encrypted
        self._max_strangers = max_strangers
        self._on_closed = on_closed
        self._on_failed_handshake = on_failed_handshake
        self._sessions: dict[int, Session] = {}
        self._strangers: dict[int, Session] = {}
        self._router = router
        self._monitor: zmq.Socket[bytes] = zmq.Context.shadow(router.context.underlying).socket(zmq.PAIR)
        # libzmq's I/O thread must never wait for us.
        self._monitor.set(zmq.RCVHWM, 0)
        address = f"inproc://monitor-{id(self)}"
        router.monitor(address, _EVENTS)
        self._monitor.connect(address)
        self._loop = asyncio.get_running_loop()
        self._monitor_fd = int(self._monitor.get(zmq.FD))
        self._loop.add_reader(self._monitor_fd, self.update)

    def __len__(self) -> int:
        return len(self._sessions)

    def sender(self, frame: zmq.Frame, peer: bytes) -> Session:
        """Whose connection this frame came on; a session that is gone where it is closed by now."""
        self.update()
        session = self._sessions.get(int(frame.get(zmq.SRCFD)))
        if session is None:
            return Session(peer=peer, gone=True)
        if session.peer == peer:
            return session
        if session.peer and not _is_later(peer, session.peer):
            return Session(peer=peer, gone=True)  # a frame of the connection that had this descriptor before
        if session.peer:
            session = self._renewed(session)
        session.peer = peer
        if self._encrypted:  # elsewhere a User-Id is what the peer itself put into its greeting
            session.key = str(frame.get("User-Id"))
        return session

    def _renewed(self, earlier: Session) -> Session:
        """What came so far came from the connection before it on this descriptor: this one is a stranger."""
        self._strangers.pop(earlier.fd, None)
        session = Session(fd=earlier.fd, opened_at=self._loop.time())
        self._sessions[session.fd] = self._strangers[session.fd] = session
        self._on_closed(earlier)
        return session

    def welcome(self, session: Session) -> None:
        """It is no stranger any more."""
        self._strangers.pop(session.fd, None)

    def shut(self, session: Session) -> None:
        """Close its connection, which libzmq has no call for; it sees the end of a stream."""
        if self._sessions.get(session.fd) is session:
            self.update()  # if it is closed by now, its file descriptor may be someone else's
        if self._sessions.get(session.fd) is session:
            self._shut(session)

    def _shut(self, session: Session) -> None:
        self._strangers.pop(session.fd, None)
        session.gone = True
        with suppress(OSError):
            connection = socket.socket(fileno=session.fd)
            try:
                connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()

    def shut_strangers(self, opened_before: float) -> None:
        """Close the connections that said no good hello since then."""
        for session in tuple(self._strangers.values()):
            if session.opened_at >= opened_before:
                return
            self.shut(session)

    def update(self) -> None:
        """Take all that the monitor told so far."""
        with suppress(zmq.Again):
            while True:
                event, _address = self._monitor.recv_multipart(zmq.NOBLOCK)
                kind, fd = _EVENT.unpack(event)
                if kind & _HANDSHAKE_FAILED:
                    self._on_failed_handshake()  # in place of the descriptor there is a reason
                    continue
                self._closed(fd)
                if kind == zmq.EVENT_ACCEPTED:
                    session = Session(fd=fd, opened_at=self._loop.time())
                    self._sessions[fd] = self._strangers[fd] = session
        while len(self._strangers) > self._max_strangers:
            self._shut(next(iter(self._strangers.values())))

    def _closed(self, fd: int) -> None:
        session = self._sessions.pop(fd, None)
        if session is not None:
            self._strangers.pop(fd, None)
            self._on_closed(session)

    def close(self) -> None:
        """To be called before the router is closed."""
        self._loop.remove_reader(self._monitor_fd)
        self._router.disable_monitor()
        self._monitor.close(linger=0)
