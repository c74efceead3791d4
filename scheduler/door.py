"""One ROUTER socket and the peers behind it."""

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path

import zmq
import zmq.asyncio

from mlxd.metrics.recorder import Recorder
from mlxd.scheduler import messages as wire
from mlxd.scheduler.config import ServerConfig, TenantConfig
from mlxd.scheduler.connections import Connections, scatter_ids
from mlxd.scheduler.errors import ConfigError, ProtocolError
from mlxd.scheduler.keys import KeyPair
from mlxd.scheduler.protocol import encode, kind_of
from mlxd.scheduler.session import Session
from mlxd.scheduler.socket_file import SocketFile
from mlxd.scheduler.zap import ZAP_DOMAIN

SEND_HIGH_WATER_MARK = 64
RECEIVE_HIGH_WATER_MARK = 8
MAX_STRANGERS = 256
KEPT_SHARE = 0.25
"""Part of `max_clients` that is kept, where need be, for tenants without a client."""
HELLO_WITHIN_S = 5.0
HANDSHAKE_MS = 3_000
LINGER_MS = 2_000
FLUSH_INTERVAL_S = 0.01
HEARTBEATS_UNTIL_DEAD = 3


class _Push(Enum):
    SENT = auto()
    FULL = auto()
    GONE = auto()


class Door:
    """Sends without ever blocking: what a peer does not take waits in its own bounded outbox.

    `on_gone` and `on_slow` are called once a session, from inside `send` or the flushing task; `on_room` when
    a session took all that waited for it.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        config: ServerConfig,
        recorder: Recorder,
        *,
        on_gone: Callable[[Session], None],
        on_slow: Callable[[Session], None],
        on_room: Callable[[Session], None],
        keys: KeyPair | None = None,
    ) -> None:
        """Binds. `keys`: the daemon's own; with them the socket speaks CURVE, and a Gatekeeper must be there.

        Raises:
            ConfigError: the address is taken or cannot be bound.
        """
        self._config = config
        self._recorder = recorder
        self._on_gone = on_gone
        self._on_slow = on_slow
        self._on_room = on_room
        self.clients: set[Session] = set()
        self._backlog: set[Session] = set()
        self._has_backlog = asyncio.Event()
        self._socket = _router(context, address, config, keys)
        self._connections = Connections(
            self._socket,
            MAX_STRANGERS,
            self.lose,
            lambda: recorder.bad_message("handshake"),
            encrypted=keys is not None,
        )
        try:
            self._file = _bind(self._socket, address)
        except ConfigError:
            self._connections.close()
            self._socket.close(linger=0)
            raise
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)

    async def receive(self) -> tuple[Session, list[bytes]]:
        """The next message's session, which may be gone, and its frames, the routing id taken off."""
        peer, *frames = await self._socket.recv_multipart(copy=False)
        return self._connections.sender(frames[0], peer.bytes), [frame.bytes for frame in frames]

    def admit(
        self, session: Session, tenant: TenantConfig, proof: str = "", *, others_without: int = 0
    ) -> None:
        """Make a stranger a client of the tenant that `proof` shows.

        Args:
            others_without: tenants without a client here, where this one has some; a part of `max_clients` is
                kept for them.
        Raises:
            ProtocolError: "too_many_clients": there are as many as may be.
        """
        assert not session.gone, "what is gone never comes back"
        limit = self._config.max_clients
        num_kept = min(others_without, int(limit * KEPT_SHARE))
        if session.tenant is None and len(self.clients) >= limit - num_kept:
            text = (
                f"{len(self.clients)} clients are connected, of {limit}; {num_kept} places are other tenants'"
            )
            raise ProtocolError("too_many_clients", text)
        self._connections.welcome(session)
        self.clients.add(session)
        session.tenant, session.proof = tenant, proof

    def shut_strangers(self) -> None:
        """Close connections that said no good hello within HELLO_WITHIN_S."""
        self._connections.shut_strangers(asyncio.get_running_loop().time() - HELLO_WITHIN_S)

    def send(self, session: Session, message: wire.ServerMessage) -> int:
        """Send or keep; a peer that is gone or too slow is reported to the callbacks instead.

        Returns:
            The frame's bytes.
        """
        if session.gone or self._socket.closed:
            return 0
        session.sent_at = asyncio.get_running_loop().time()
        self._recorder.message("out", kind_of(message))
        frame = encode(message, session.encoding)
        result = _Push.FULL if session.outbox else self._push(session.peer, frame)
        if result is _Push.GONE:
            self._forget(session)
        elif result is _Push.FULL:
            self._hold(session, message, frame)
        return len(frame)

    def _push(self, peer: bytes, frame: bytes) -> _Push:
        # With NOBLOCK the future is done when it is returned.
        error = asyncio.ensure_future(self._socket.send_multipart([peer, frame], zmq.NOBLOCK)).exception()
        if error is None:
            return _Push.SENT
        if isinstance(error, zmq.Again):
            return _Push.FULL
        if isinstance(error, zmq.ZMQError) and error.errno == zmq.EHOSTUNREACH:
            return _Push.GONE
        raise error

    def _hold(self, session: Session, message: wire.ServerMessage, frame: bytes) -> None:
        limit = self._config.max_client_buffer_bytes
        if not session.slow and session.outbox_bytes + len(frame) > limit:
            session.slow = True
            self._on_slow(session)
        if session.slow:
            if not isinstance(message, wire.Terminal):
                return
            if isinstance(message, wire.Done):
                text = f"the client left more than {limit} bytes unread"
                frame = encode(wire.Error(id=message.id, code="slow_client", message=text), session.encoding)
            if session.outbox_bytes + len(frame) > 2 * limit:
                self.lose(session)
                return
        session.outbox.append(frame)
        session.outbox_bytes += len(frame)
        self._backlog.add(session)
        self._has_backlog.set()

    async def flush_forever(self) -> None:
        """Send what waits as peers take it. A ROUTER cannot say which peer has room, so this asks."""
        while True:
            await self._has_backlog.wait()
            self.flush()
            await asyncio.sleep(FLUSH_INTERVAL_S)

    def flush(self) -> None:
        for session in list(self._backlog):
            self._flush_one(session)
        if not self._backlog:
            self._has_backlog.clear()

    def _flush_one(self, session: Session) -> None:
        while session.outbox:
            result = self._push(session.peer, session.outbox[0])
            if result is _Push.FULL:
                return
            if result is _Push.GONE:
                self._forget(session)
                return
            session.outbox_bytes -= len(session.outbox.popleft())
        session.slow = False
        self._backlog.discard(session)
        self._on_room(session)

    @property
    def buffered_bytes(self) -> int:
        return sum(session.outbox_bytes for session in self._backlog)

    def lose(self, session: Session) -> None:
        """Forget a client that left, and close the connection of one that takes nothing."""
        if session.lost or self._socket.closed:
            return
        session.lost = True  # what shutting finds closed comes here again
        self._connections.shut(session)
        self._forget(session)

    def _forget(self, session: Session) -> None:
        """Its connection is closed: what has the descriptor by now may be another one."""
        session.lost = session.gone = True
        session.outbox.clear()
        session.outbox_bytes = 0
        self._backlog.discard(session)
        self.clients.discard(session)
        self._on_gone(session)

    def close(self) -> None:
        """What the socket took already still goes out for LINGER_MS."""
        if self._file is not None:
            self._file.remove()
        self._connections.close()
        self._socket.close(linger=LINGER_MS)


def _router(
    context: zmq.asyncio.Context, address: str, config: ServerConfig, keys: KeyPair | None
) -> zmq.asyncio.Socket:
    scatter_ids()
    socket = context.socket(zmq.ROUTER)
    socket.set(zmq.ROUTER_MANDATORY, 1)
    socket.set(zmq.MAXMSGSIZE, config.max_message_bytes)
    socket.set(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
    socket.set(zmq.RCVHWM, RECEIVE_HIGH_WATER_MARK)
    socket.set(zmq.LINGER, LINGER_MS)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.set(zmq.IPV6, 1)
    if keys is not None:
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, keys.secret.encode())
        socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # else everyone gets in where nobody answers ZAP
    if address.startswith("tcp://"):
        socket.set(zmq.HEARTBEAT_IVL, config.heartbeat_ms)
        socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEATS_UNTIL_DEAD * config.heartbeat_ms)
    return socket


def _bind(socket: zmq.asyncio.Socket, address: str) -> SocketFile | None:
    """Raises ConfigError. The file of an ipc address."""
    file = None
    if address.startswith("ipc://"):
        file = SocketFile(Path(address.removeprefix("ipc://")))
        socket.set(zmq.USE_FD, file.listener.fileno())
    try:
        socket.bind(address.replace("tcp://localhost:", "tcp://127.0.0.1:"))
    except zmq.ZMQError as error:
        if file is not None:
            file.listener.close()
            file.remove()
        raise ConfigError(f"{address}: {error.strerror}") from None
    if file is not None:
        file.listener.detach()  # libzmq closes it
    return file
