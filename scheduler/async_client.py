"""The asyncio client: many requests at once over one connection."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeVar, Unpack

from msgspec import UNSET

from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler import messages as wire
from mlxd.scheduler.client_request import ClientRequest
from mlxd.scheduler.connection import Connection, cancel_address
from mlxd.scheduler.errors import ConnectionLostError, ProtocolError
from mlxd.scheduler.login import Login
from mlxd.scheduler.protocol import kind_of
from mlxd.scheduler.request_options import RequestOptions, checked_id, generate_message, new_id
from mlxd.scheduler.results import Completion, TextChunk
from mlxd.scheduler.transport import Connect, ZmqTransport

DEFAULT_TIMEOUT_S = 30.0

_Reply = TypeVar("_Reply", bound=wire.ServerMessage)


class AsyncClient:
    """Connects at the first call, and anew after a lost connection. Use it as `async with AsyncClient(...)`.

    Every call raises what can go wrong as one of `mlxd.scheduler.errors`: UnauthenticatedError,
    InvalidParamError, InvalidPromptError, RejectedError, RequestFailedError, EngineFailedError,
    ConnectionLostError, ClientTimeoutError, ProtocolError.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        token: str | None = None,
        key: str | Path | None = None,
        server_key: str | Path | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retries: int = 0,
        wait_s: float = 0.0,
        resume_s: float = 0.0,
        window_bytes: int = 0,
        connect: Connect | None = None,
    ) -> None:
        """Raises ConfigError where there is no credential, two, or a wrong one.

        Args:
            endpoint: the daemon's submit socket, "ipc:///tmp/mlxd.sock".
            token: the tenant's secret, for a daemon on this machine.
            key, server_key: for a daemon that speaks CURVE, the tenant's secret key and the daemon's public
                one; each as Z85 text, or the path of its file.
            timeout_s: longest silence of the daemon to bear. It shows once a heartbeat that a request is
                still known, so a long queue or a long prompt is no silence.
            retries: how often a request that was rejected as retryable is sent again, each time after the
                pause that the daemon asked for.
            wait_s: how long to wait for a daemon that is not there yet, or loads its model; 0: not at all.
            resume_s: how long to try to go on with a request whose connection was lost, also after a restart
                of the daemon; 0 raises ConnectionLostError at once. The daemon has to keep such requests: see
                `server.resume_grace_s` and `journal`.
            window_bytes: most bytes of a stream that may be under way and not taken from it yet; 0: no limit.
                The daemon holds the rest, and ends the request as "slow_client" where that is too much.
            connect: opens a connection; to `endpoint` by default.
        """
        self._timeout_s = timeout_s
        self._retries = retries
        self._wait_s = wait_s
        self._resume_s = resume_s
        self._window_bytes = window_bytes
        if connect is None:
            login = Login.of(token, key, server_key)
            connect = partial(ZmqTransport.connect, endpoint, login, timeout_s=timeout_s, wait_s=wait_s)
        self._connect: Connect = connect
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._is_closed = False

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Open requests end with ConnectionLostError here, and there as if the client had vanished."""
        self._is_closed = True
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()

    async def generate(
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """The whole answer to a text, a conversation or token ids.

        Without its end `deadline_ms` after it arrived the request ends with RequestFailedError "expired", or
        "hopeless" before it begins.
        """
        message = generate_message(prompt, sampling, stream=False, **options)
        async with self._request(message) as request:
            done = await request.next()
        if not isinstance(done, wire.Done) or done.text is UNSET or done.token_ids is UNSET:
            raise ProtocolError("decode", f"the daemon sent {type(done).__name__} in place of a whole answer")
        logprobs = () if done.logprobs is UNSET else done.logprobs
        return Completion(done.text, done.token_ids, done.finish_reason, done.usage, logprobs)

    async def stream(
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[TextChunk, None]:
        """The answer piece by piece; closing the generator early cancels the request."""
        message = generate_message(prompt, sampling, stream=True, **options)
        async with aclosing(self._chunks(message)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def resume(self, request_id: str, seq: int = 0) -> AsyncGenerator[TextChunk, None]:
        """The answer to a request of this tenant that another connection made, from piece `seq` on.

        `seq` counts the tokens that came already, and a chunk without any as one. Closing the generator early
        does not cancel the request. Raises RequestFailedError "gone" where the daemon does not know it.
        """
        message = wire.Resume(id=checked_id(request_id), seq=seq)
        async with aclosing(self._chunks(message)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _chunks(self, message: wire.Generate | wire.Resume) -> AsyncGenerator[TextChunk, None]:
        async with self._request(message) as request:
            while isinstance(reply := await request.next(), wire.Chunk):
                logprobs = () if reply.logprobs is UNSET else reply.logprobs
                yield TextChunk(reply.text, reply.token_ids, logprobs)
        text = "" if reply.text is UNSET else reply.text
        token_ids = () if reply.token_ids is UNSET else reply.token_ids
        logprobs = () if reply.logprobs is UNSET else reply.logprobs
        yield TextChunk(text, token_ids, logprobs, reply.finish_reason, reply.usage)

    async def cancel(self, request_id: str) -> bool:
        """Whether the tenant had such an open request; it ends with RequestFailedError "cancelled"."""
        message = wire.Cancel(id=checked_id(request_id))
        reply = await self._ask(message, cancel_address(request_id), wire.CancelReply)
        return reply.result == "cancelling"

    async def status(self) -> wire.StatusReply:
        """The engine's state as this tenant may see it."""
        message = wire.Status(id=new_id())
        return await self._ask(message, message.id, wire.StatusReply)

    async def ping(self) -> str:
        """The daemon's state, told by its scheduler."""
        message = wire.Ping(id=new_id())
        return (await self._ask(message, message.id, wire.Pong)).state

    async def drain(self) -> None:
        """Ask the daemon to finish and exit; an operator may."""
        message = wire.Drain(id=new_id())
        await self._ask(message, message.id, wire.Draining)

    async def reload(self) -> tuple[str, ...]:
        """Have the daemon read its file anew; an operator may. Returns a line for each tenant that changed.

        Raises:
            ConfigError: the daemon refused the file, and nothing changed.
        """
        message = wire.Reload(id=new_id())
        return (await self._ask(message, message.id, wire.Reloaded)).changes

    async def _ask(self, message: wire.ClientMessage, address: str, expected: type[_Reply]) -> _Reply:
        connection = await self._connected()
        with connection.mailbox(address, kind_of(message)) as mailbox:
            await connection.send(message)
            reply = await mailbox.next()
        if not isinstance(reply, expected):
            raise ProtocolError("decode", f"the daemon sent {type(reply).__name__}, not {expected.__name__}")
        return reply

    async def _connected(self) -> Connection:
        async with self._connecting:
            if self._is_closed:
                raise ConnectionLostError("the client is closed")
            if self._connection is None or self._connection.is_lost:
                self._connection = Connection(await self._connect(), self._timeout_s)
            return self._connection

    def _request(self, message: wire.Generate | wire.Resume) -> ClientRequest:
        return ClientRequest(
            message,
            self._connected,
            retries=self._retries,
            wait_s=self._wait_s,
            resume_s=self._resume_s,
            window_bytes=self._window_bytes,
        )
