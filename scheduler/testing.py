"""For tests of code that uses mlxd: clients whose daemon is a list of replies. No sockets, no model.

daemon = FakeDaemon(["Paris.", RejectedError("queue_full", "full", retryable=True)])
with daemon.client() as client:
    assert client.generate("Capital of France?").text == "Paris."
assert daemon.requests[0].prompt == "Capital of France?"
"""

import asyncio
import re
from collections import deque
from collections.abc import Iterable
from typing import Literal

from msgspec import UNSET

from mlxd.scheduler import messages as wire
from mlxd.scheduler.client import AsyncClient, Client
from mlxd.scheduler.errors import (
    ClientTimeoutError,
    ConnectionLostError,
    InvalidParamError,
    InvalidPromptError,
    MlxdError,
    RejectedError,
)
from mlxd.scheduler.events import Usage
from mlxd.scheduler.replies import reply_of
from mlxd.scheduler.results import Completion

Reply = str | Completion | MlxdError
"""What one request gets: a text (a chunk a word), a whole completion (one chunk), or an error.

A ClientTimeoutError makes the daemon silent about that request, a ConnectionLostError closes the connection;
every other error is sent as the daemon would send it.
"""


class FakeDaemon:
    """Answers each request with the next reply, in the order in which requests come.

    Attributes:
        requests: every generate message that came.
    """

    def __init__(self, replies: Iterable[Reply]) -> None:
        self.requests: list[wire.Generate] = []
        self._replies = deque(replies)

    def client(self, *, timeout_s: float = 1.0, retries: int = 0) -> Client:
        return Client("fake", token="", timeout_s=timeout_s, retries=retries, connect=self.connect)

    def async_client(self, *, timeout_s: float = 1.0, retries: int = 0) -> AsyncClient:
        return AsyncClient("fake", token="", timeout_s=timeout_s, retries=retries, connect=self.connect)

    async def connect(self) -> "FakeTransport":
        return FakeTransport(self)

    def next_reply(self, request: wire.Generate) -> Reply:
        """Raises AssertionError where the test asks more often than it scripted replies."""
        self.requests.append(request)
        assert self._replies, f"no reply left for request {len(self.requests)}"
        return self._replies.popleft()


class FakeTransport:
    """A connection to a FakeDaemon: `mlxd.scheduler.transport.Transport` without sockets."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon
        self._arrivals: asyncio.Queue[wire.ServerMessage | ConnectionLostError] = asyncio.Queue()
        self._silent: set[str] = set()

    async def send(self, message: wire.ClientMessage) -> None:
        match message:
            case wire.Generate():
                self._answer(message, self._daemon.next_reply(message))
            case wire.Cancel():
                self._cancel(message.id)
            case wire.Status():
                self._arrivals.put_nowait(fake_status(message.id))
            case wire.Ping():
                self._arrivals.put_nowait(wire.Pong(id=message.id, state="running"))
            case wire.Drain():
                self._arrivals.put_nowait(wire.Draining(id=message.id))
            case wire.Resume():
                text = "a fake daemon keeps no requests"
                error = wire.Error(id=message.id, code="gone", message=text, about="resume")
                self._arrivals.put_nowait(error)
            case wire.Grant():
                pass
            case wire.Reload():
                self._arrivals.put_nowait(wire.Reloaded(id=message.id, changes=()))
            case wire.Hello():
                raise AssertionError("hello is the transport's own business")

    async def receive(self) -> wire.ServerMessage:
        arrival = await self._arrivals.get()
        if isinstance(arrival, ConnectionLostError):
            raise arrival
        return arrival

    async def close(self) -> None:
        self._silent.clear()

    def _answer(self, request: wire.Generate, reply: Reply) -> None:
        match reply:
            case ClientTimeoutError():
                self._arrivals.put_nowait(wire.Accepted(id=request.id))
                self._silent.add(request.id)
            case ConnectionLostError():
                self._arrivals.put_nowait(reply)
            case MlxdError():
                self._refuse(request, reply)
            case Completion():
                self._complete(request, reply, [reply.text])
            case str():
                words = re.findall(r"\s*\S+|\s+$", reply)
                usage = Usage(prompt_tokens=1, completion_tokens=len(words))
                self._complete(request, Completion(reply, tuple(range(len(words))), "stop", usage), words)

    def _refuse(self, request: wire.Generate, error: MlxdError) -> None:
        if isinstance(error, RejectedError):
            self._arrivals.put_nowait(reply_of(error, request.id))
            return
        if isinstance(error, (InvalidParamError, InvalidPromptError)):
            self._arrivals.put_nowait(reply_of(error, request.id, about="generate"))
        else:
            self._arrivals.put_nowait(wire.Accepted(id=request.id))
            self._arrivals.put_nowait(reply_of(error, request.id))

    def _complete(self, request: wire.Generate, answer: Completion, pieces: list[str]) -> None:
        self._arrivals.put_nowait(wire.Accepted(id=request.id))
        reason: Literal["stop", "length"] = "length" if answer.finish_reason == "length" else "stop"
        if not request.stream:
            done = wire.Done(
                id=request.id,
                finish_reason=reason,
                usage=answer.usage,
                text=answer.text,
                token_ids=answer.token_ids,
                logprobs=answer.logprobs or UNSET,
            )
            self._arrivals.put_nowait(done)
            return
        for seq, piece in enumerate(pieces):
            ids = answer.token_ids if len(pieces) == 1 else answer.token_ids[seq : seq + 1]
            chunk = wire.Chunk(
                id=request.id,
                seq=seq,
                text=piece,
                token_ids=ids,
                logprobs=answer.logprobs[: len(ids)] or UNSET,
            )
            self._arrivals.put_nowait(chunk)
        self._arrivals.put_nowait(wire.Done(id=request.id, finish_reason=reason, usage=answer.usage))

    def _cancel(self, request_id: str) -> None:
        found = request_id in self._silent
        self._arrivals.put_nowait(
            wire.CancelReply(id=request_id, result="cancelling" if found else "not_found")
        )
        if found:
            self._silent.remove(request_id)
            self._arrivals.put_nowait(wire.Cancelled(id=request_id, usage=Usage(1, 0)))


def fake_client(replies: Iterable[Reply]) -> Client:
    """A Client that gets these replies, one a request."""
    return FakeDaemon(replies).client()


def fake_async_client(replies: Iterable[Reply]) -> AsyncClient:
    """An AsyncClient that gets these replies, one a request."""
    return FakeDaemon(replies).async_client()


def fake_status(reply_id: str = "") -> wire.StatusReply:
    """That of an idle daemon without tenants, as no operator sees it."""
    return wire.StatusReply(
        id=reply_id,
        state="running",
        epoch="fake",
        model="fake",
        tenants={},
        waiting=0,
        running=0,
        kv_capacity_bytes=0,
        notes={},
        error="",
    )
