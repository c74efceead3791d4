"""A client's connection to the daemon, behind a seam that tests can replace."""

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from mlxd.scheduler import messages as wire
from mlxd.scheduler.addresses import seen_from
from mlxd.scheduler.errors import (
    ClientTimeoutError,
    ConfigError,
    ConnectionLostError,
    InvalidParamError,
    MlxdError,
    ProtocolError,
    UnauthenticatedError,
)
from mlxd.scheduler.login import Login
from mlxd.scheduler.protocol import decode_reply, encode

RECONNECT_MS = 50
MAX_RECONNECT_MS = 1_000
TCP_HEARTBEAT_MS = 1_000
HANDSHAKE_RETRY_S = 1.0
MAX_FAILED_HANDSHAKES = 3
"""Without a word. One may be a daemon that ends; more are a key, or none, that the daemon does not take."""
LINGER_MS = 500

_MONITORS = count()
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Transport(Protocol):
    """An open connection on which hello is done."""

    async def send(self, message: wire.ClientMessage) -> None:
        """Raises InvalidParamError for a message that cannot be told."""
        ...

    async def receive(self) -> wire.ServerMessage:
        """The daemon's next message.

        Raises:
            ConnectionLostError: there will be none.
            ProtocolError: this one cannot be read.
        """
        ...

    async def close(self) -> None:
        """What was sent still goes out; called once."""
        ...


Connect = Callable[[], Awaitable[Transport]]
"""Opens a connection; raises ClientTimeoutError, UnauthenticatedError, ConfigError or ProtocolError."""


class ZmqTransport:
    """Two DEALER sockets: what asks for a stream goes out on `submit`, everything else on `control`."""

    def __init__(self, submit: zmq.asyncio.Socket, control: zmq.asyncio.Socket) -> None:
        self._submit = submit
        self._control = control
        self._arrivals: asyncio.Queue[wire.ServerMessage | MlxdError] = asyncio.Queue()
        self._tasks = [
            asyncio.create_task(work(socket))
            for socket in (submit, control)
            for work in (self._read, self._watch)
        ]

    @classmethod
    async def connect(
        cls, endpoint: str, login: Login, *, timeout_s: float, wait_s: float = 0.0, client: str = ""
    ) -> "ZmqTransport":
        """Say hello on both sockets, trying again until `timeout_s` and `wait_s` are over.

        Args:
            wait_s: how long to wait for a daemon that is not there yet.
        Raises:
            ClientTimeoutError: nobody answered, or there is no such ipc socket.
            UnauthenticatedError: the token or key is no tenant's, or the server's key is not this daemon's.
            ConfigError: the endpoint is not one, or none for such a login or user; or there can be no more
                sockets.
            InvalidParamError: the token is no text.
            ProtocolError: the daemon refused for another reason; `code` says which.
        """
        login.check_endpoint(endpoint)
        hello = _frame(wire.Hello(v=wire.PROTOCOL_VERSION, token=login.token, client=client))
        patience_s = wait_s + timeout_s
        await _wait_for_socket(endpoint, wait_s)
        try:
            async with asyncio.timeout(patience_s):
                submit, welcome = await _join(endpoint, login, hello)
                try:
                    control, _ = await _join(seen_from(endpoint, welcome.control), login, hello)
                except BaseException:
                    submit.close(linger=0)
                    raise
        except TimeoutError:
            text = f"no answer from {endpoint} within {patience_s:g} s; is the daemon running?"
            raise ClientTimeoutError(text) from None
        except zmq.ZMQError as error:
            raise ConfigError(f"no socket for {endpoint}: {error.strerror}") from None
        return cls(submit, control)

    async def send(self, message: wire.ClientMessage) -> None:
        is_streaming = isinstance(message, wire.Generate | wire.Resume | wire.Grant)
        socket = self._submit if is_streaming else self._control
        await socket.send(_frame(message))

    async def receive(self) -> wire.ServerMessage:
        arrival = await self._arrivals.get()
        if isinstance(arrival, MlxdError):
            raise arrival
        return arrival

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frame = await socket.recv()
            try:
                message = decode_reply(frame)
            except ProtocolError as error:
                self._arrivals.put_nowait(error)
                continue
            if isinstance(message, wire.Error) and message.code == "unauthenticated":
                # The socket reconnected by itself: to the daemon we are a stranger, our requests are gone.
                self._arrivals.put_nowait(ConnectionLostError("the daemon no longer knows this connection"))
            else:
                self._arrivals.put_nowait(message)

    async def _watch(self, socket: zmq.asyncio.Socket) -> None:
        with _monitored(socket, zmq.EVENT_DISCONNECTED) as monitor:
            await recv_monitor_message(monitor)
            self._arrivals.put_nowait(ConnectionLostError("the daemon closed the connection"))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.wait(self._tasks)
        finally:  # who waits may be cancelled
            for socket in (self._submit, self._control):
                socket.close(linger=LINGER_MS)


def _frame(message: wire.ClientMessage) -> bytes:
    """Raises InvalidParamError for what no frame can hold: half a surrogate pair, a number beyond 64 bits."""
    try:
        return encode(message)
    except (UnicodeEncodeError, OverflowError) as error:
        raise InvalidParamError.from_message("", f"the message cannot be sent: {error}") from None


async def _wait_for_socket(endpoint: str, wait_s: float) -> None:
    """ZeroMQ would wait for an ipc socket without a word.

    Raises:
        ClientTimeoutError: it is missing.
        ConfigError: this user may not use it.
    """
    if not endpoint.startswith("ipc://"):
        return
    path = Path(endpoint.removeprefix("ipc://"))
    try:
        async with asyncio.timeout(wait_s):
            while not path.exists():
                await asyncio.sleep(RECONNECT_MS / 1000)
    except TimeoutError:
        text = f"no daemon at {endpoint}: there is no such socket; is it running?"
        raise ClientTimeoutError(text) from None
    except OSError as error:
        raise ConfigError(f"endpoint {endpoint!r}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise ConfigError(f"endpoint {endpoint!r}: {os.strerror(errno.EACCES)}; the daemon is another user's")


async def _join(endpoint: str, login: Login, hello: bytes) -> tuple[zmq.asyncio.Socket, wire.Welcome]:
    """A connected socket on which hello was answered; a hello that got lost is said again."""
    patience_s = HANDSHAKE_RETRY_S
    while True:
        socket = _dealer(login, heartbeats=endpoint.startswith("tcp://"))
        try:
            async with asyncio.timeout(patience_s):
                welcome = _welcomed(decode_reply(await _greet(socket, endpoint, hello)))
            return socket, welcome
        except TimeoutError:
            socket.close(linger=0)
            patience_s *= 2
        except BaseException:
            socket.close(linger=0)
            raise


async def _greet(socket: zmq.asyncio.Socket, endpoint: str, hello: bytes) -> bytes:
    """Connect, say hello and wait for the answer.

    Raises:
        ConfigError: the endpoint is not one.
        UnauthenticatedError: the handshake fails, which is all that a wrong key is answered by.
    """
    with _monitored(socket, _HANDSHAKE_FAILED) as monitor:
        refusal = asyncio.ensure_future(_refusal(monitor))
        reply = asyncio.ensure_future(socket.recv())
        try:
            _connect(socket, endpoint)
            await socket.send(hello)
            await asyncio.wait((reply, refusal), return_when=asyncio.FIRST_COMPLETED)
            if reply.done():
                return reply.result()
            text = f"the handshake with {endpoint} failed: no valid credential, or another daemon's key"
            raise UnauthenticatedError(text)
        finally:
            reply.cancel()
            refusal.cancel()


@contextmanager
def _monitored(socket: zmq.asyncio.Socket, events: int) -> Iterator[zmq.asyncio.Socket]:
    """What libzmq tells of `socket`, one monitor at a time.

    Each has an address of its own: that of an earlier one may still be taken for a moment after its end.
    """
    address = f"inproc://mlxd-monitor-{next(_MONITORS)}"
    socket.monitor(address, events)
    monitor = zmq.asyncio.Context.instance().socket(zmq.PAIR)
    monitor.connect(address)
    try:
        yield monitor
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)


async def _refusal(monitor: zmq.asyncio.Socket) -> None:
    """Returns once the handshake failed for good, or too often."""
    for _ in range(MAX_FAILED_HANDSHAKES):
        failure = await recv_monitor_message(monitor)
        if failure["event"] != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            return  # ZeroMQ does not try again


def _welcomed(reply: wire.ServerMessage) -> wire.Welcome:
    if isinstance(reply, wire.Welcome):
        return reply
    if isinstance(reply, wire.Error) and reply.code == "unauthenticated":
        raise UnauthenticatedError
    if isinstance(reply, wire.Error):
        raise ProtocolError(reply.code, reply.message)
    raise ProtocolError("unsupported", f"hello was answered by {type(reply).__name__}")


def _dealer(login: Login, *, heartbeats: bool) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.set(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
    socket.set(zmq.IPV6, 1)
    if heartbeats:
        socket.set(zmq.HEARTBEAT_IVL, TCP_HEARTBEAT_MS)
    if login.keys is not None:
        socket.set(zmq.CURVE_SECRETKEY, login.keys.secret.encode())
        socket.set(zmq.CURVE_PUBLICKEY, login.keys.public.encode())
        socket.set(zmq.CURVE_SERVERKEY, login.server_key.encode())
    return socket


def _connect(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    """Raises ConfigError."""
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"endpoint {endpoint!r}: {error.strerror}") from None
