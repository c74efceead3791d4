"""One open transport, and the mailboxes of those who wait for something on it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import UNSET

from mlxd.scheduler import messages as wire
from mlxd.scheduler.errors import (
    UNKNOWN_TYPE,
    ClientTimeoutError,
    ConnectionLostError,
    MlxdError,
    ProtocolError,
)
from mlxd.scheduler.lifetime import Lifetime
from mlxd.scheduler.replies import error_of, rejection_of
from mlxd.scheduler.transport import Transport

CLOSED = "the client is closed"


def reply_address(message: wire.ServerMessage) -> str:
    """The mailbox a message belongs in: a cancel's reply has the id of the request that it ends."""
    if isinstance(message, wire.Welcome) or message.id is UNSET:
        return ""
    if isinstance(message, wire.CancelReply) or (
        isinstance(message, wire.Error) and message.about == "cancel"
    ):
        return cancel_address(message.id)
    return message.id


def cancel_address(request_id: str) -> str:
    return f"cancel {request_id}"


class Mailbox:
    """What arrived for one waiter and was not read yet.

    Attributes:
        asked: type of the message that has no answer yet; empty while the request it asked for is open.
    """

    def __init__(self, asked: str, timeout_s: float) -> None:
        self.asked = asked
        self._timeout_s = timeout_s
        self._arrivals: asyncio.Queue[wire.ServerMessage | MlxdError] = asyncio.Queue()

    def put(self, arrival: wire.ServerMessage | MlxdError) -> None:
        self._arrivals.put_nowait(arrival)

    async def next(self) -> wire.ServerMessage:
        """The next message that is not a sign of life, an error or a rejection.

        Raises:
            ClientTimeoutError: nothing came for `timeout_s`.
            ConnectionLostError: nothing will.
            MlxdError: what the daemon answered.
        """
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    arrival = await self._arrivals.get()
            except TimeoutError:
                raise ClientTimeoutError(f"the daemon was silent for {self._timeout_s:g} s") from None
            match arrival:
                case MlxdError():
                    raise ConnectionLostError(str(arrival)) from arrival
                case wire.Error() if self._is_about_it(arrival):
                    raise error_of(arrival)
                case wire.Rejected() if self.asked:
                    raise rejection_of(arrival)
                case wire.KeepAlive() | wire.Error() | wire.Rejected():
                    continue
                case _:
                    return arrival

    def _is_about_it(self, error: wire.Error) -> bool:
        """Whether it ends the request or answers the message, and not another one of the same id."""
        return error.about is UNSET or (bool(self.asked) and error.about in (self.asked, UNKNOWN_TYPE))


class Connection:
    """Reads the transport from construction until it is lost or closed."""

    def __init__(self, transport: Transport, timeout_s: float) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        self._mailboxes: dict[str, Mailbox] = {}
        self._lifetime = Lifetime()
        self._reader = asyncio.create_task(self._read())

    @property
    def is_lost(self) -> bool:
        return self._lifetime.error is not None

    @contextmanager
    def mailbox(self, address: str, asked: str) -> Iterator[Mailbox]:
        """For the answer to a message of type `asked`.

        Raises:
            ProtocolError: "id_conflict": somebody waits at this address already.
        """
        if address in self._mailboxes:
            raise ProtocolError("id_conflict", f"{address!r} is waited for already")
        mailbox = self._mailboxes[address] = Mailbox(asked, self._timeout_s)
        if self._lifetime.error is not None:
            mailbox.put(self._lifetime.error)
        try:
            yield mailbox
        finally:
            del self._mailboxes[address]

    async def send(self, message: wire.ClientMessage) -> None:
        """
        Raises:
            ClientTimeoutError: the daemon takes nothing for `timeout_s`.
            ConnectionLostError: it never will.
        """
        try:
            async with self._lifetime.call(), asyncio.timeout(self._timeout_s):
                await self._transport.send(message)
        except TimeoutError:
            raise ClientTimeoutError(f"the daemon took nothing for {self._timeout_s:g} s") from None

    async def _read(self) -> None:
        try:
            while True:
                self._hand_out(await self._transport.receive())
        except MlxdError as error:
            self._lose(error)
        finally:
            self._lose(ConnectionLostError(CLOSED))
            await self._transport.close()

    def _lose(self, error: MlxdError) -> None:
        if not self.is_lost:
            self._lifetime.end(error)
            for mailbox in self._mailboxes.values():
                mailbox.put(error)

    def _hand_out(self, message: wire.ServerMessage) -> None:
        """Messages that nobody waits for any more are dropped; an error that is nobody's own is raised."""
        address = reply_address(message)
        if address in self._mailboxes:
            self._mailboxes[address].put(message)
        elif isinstance(message, wire.Error) and not address:
            raise error_of(message)

    async def close(self) -> None:
        """Whoever still waits gets ConnectionLostError."""
        self._lose(ConnectionLostError(CLOSED))
        self._reader.cancel()
        await asyncio.wait([self._reader])
