"""One request of a client, over as many connections as it takes."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self

import msgspec

from mlxd.scheduler import messages as wire
from mlxd.scheduler.connection import Connection, Mailbox, cancel_address
from mlxd.scheduler.errors import (
    ClientTimeoutError,
    ConnectionLostError,
    MlxdError,
    ProtocolError,
    RejectedError,
    RequestFailedError,
)
from mlxd.scheduler.protocol import encode, kind_of

MIN_RETRY_S = 0.05
RECONNECT_S = 0.2
LEAVE_S = 1.0
"""Longest wait for the answer to a cancel on the way out."""


class ClientRequest:
    """Sends a message that asks for an answer and reads what comes. Cancelled on the way out unless it ended.

    Args:
        message: a generate, or a resume, which is never cancelled.
        connect: the connection to use now.
        retries: how often to send it again where it was rejected as retryable.
        wait_s: how long to go on sending it to a daemon that loads.
        resume_s: how long to try to go on after a lost connection; 0: not at all.
        window_bytes: most bytes of chunks that may be under way, unread by the caller; 0: no limit.
    """

    def __init__(
        self,
        message: wire.Generate | wire.Resume,
        connect: Callable[[], Awaitable[Connection]],
        *,
        retries: int,
        wait_s: float,
        resume_s: float,
        window_bytes: int,
    ) -> None:
        if window_bytes:
            message = msgspec.structs.replace(message, credit=window_bytes)
        self._message = message
        self._connect = connect
        self._retries = retries
        self._wait_until = asyncio.get_running_loop().time() + wait_s
        self._resume_s = resume_s
        self._window_bytes = window_bytes
        self._read_bytes = 0
        self._seq = message.seq if isinstance(message, wire.Resume) else 0
        self._is_accepted = False
        self._has_ended = False
        self._stack = ExitStack()
        self._connection: Connection | None = None
        self._mailbox: Mailbox | None = None

    async def __aenter__(self) -> Self:
        try:
            try:
                await self._open(self._message)
            except ConnectionLostError:
                if not self._may_reopen:
                    raise
                await self._reopen()
        except BaseException:
            await self._leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave()

    async def next(self) -> wire.Chunk | wire.Done:
        """The next piece, or the end; raises what `Mailbox.next` raises."""
        while True:
            try:
                await self._grant()
                return self._checked(await self._next())
            except ConnectionLostError:
                if not self._may_reopen:
                    raise
                await self._reopen()

    @property
    def _may_reopen(self) -> bool:
        return bool(self._resume_s) and not (self._connection is None or self._connection.is_closed)

    async def _open(self, message: wire.Generate | wire.Resume) -> None:
        """Send `message` until it is accepted."""
        self._connection = await self._connect()
        self._stack.close()
        self._mailbox = self._stack.enter_context(self._connection.mailbox(message.id, kind_of(message)))
        retries_left = self._retries
        while True:
            await self._connection.send(message)
            try:
                reply = await self._next()
            except RejectedError as error:
                if not self._waits_for(error):
                    if not error.retryable or not retries_left:
                        raise
                    retries_left -= 1
                await asyncio.sleep(max(MIN_RETRY_S, error.retry_after_ms / 1000))
                continue
            if not isinstance(reply, wire.Accepted):
                raise ProtocolError("decode", f"the daemon sent {type(reply).__name__} before accepted")
            self._mailbox.asked = ""
            self._is_accepted = True
            self._has_ended = False
            return

    def _waits_for(self, error: RejectedError) -> bool:
        return error.reason == "loading" and asyncio.get_running_loop().time() < self._wait_until

    async def _grant(self) -> None:
        """Allow again what was read, half a window at a time."""
        if self._window_bytes and self._read_bytes >= (self._window_bytes + 1) // 2:
            assert self._connection is not None
            num_bytes, self._read_bytes = self._read_bytes, 0
            await self._connection.send(wire.Grant(id=self._message.id, bytes=num_bytes))

    async def _reopen(self) -> None:
        """Raises ConnectionLostError where the daemon does not come back in time, or forgot the request."""
        # Sent twice, the message itself does no harm; where it was not accepted it may never have arrived.
        message = self._message
        if self._is_accepted:
            message = wire.Resume(id=message.id, seq=self._seq, credit=message.credit)
        self._read_bytes = 0
        try:
            async with asyncio.timeout(self._resume_s):
                while True:
                    try:
                        await self._open(message)
                        return
                    except (ConnectionLostError, ClientTimeoutError):
                        await asyncio.sleep(RECONNECT_S)
                    except RejectedError as error:
                        if not error.retryable:
                            raise
                        await asyncio.sleep(max(RECONNECT_S, error.retry_after_ms / 1000))
        except TimeoutError:
            text = f"the connection was lost and not made again within {self._resume_s:g} s"
            raise ConnectionLostError(text) from None

    def _checked(self, reply: wire.ServerMessage) -> wire.Chunk | wire.Done:
        match reply:
            case wire.Done():
                self._has_ended = True
            case wire.Chunk() if reply.seq == self._seq:
                self._seq += max(1, len(reply.token_ids))
                if self._window_bytes:
                    self._read_bytes += len(encode(reply))
            case wire.Chunk():
                text = f"piece {reply.seq} came in place of piece {self._seq}"
                raise ProtocolError("decode", text)
            case wire.Cancelled():
                self._has_ended = True
                raise RequestFailedError("cancelled", "the request was cancelled")
            case _:
                raise ProtocolError("decode", f"the daemon sent {type(reply).__name__} within an answer")
        return reply

    async def _next(self) -> wire.ServerMessage:
        assert self._mailbox is not None
        try:
            return await self._mailbox.next()
        except MlxdError as error:
            self._has_ended = not isinstance(error, ClientTimeoutError)
            raise

    async def _leave(self) -> None:
        connection, is_ours = self._connection, isinstance(self._message, wire.Generate)
        try:
            if connection and is_ours and not (self._has_ended or connection.is_lost):
                await self._cancel(connection)
        finally:
            self._stack.close()

    async def _cancel(self, connection: Connection) -> None:
        """Waits for the answer: what a daemon has not read when a connection is closed, it drops."""
        message = wire.Cancel(id=self._message.id)
        address = cancel_address(message.id)
        with suppress(MlxdError, TimeoutError), connection.mailbox(address, kind_of(message)) as mailbox:
            async with asyncio.timeout(LEAVE_S):
                await connection.send(message)
                await mailbox.next()
