"""The blocking client: an AsyncClient on a thread of its own."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack

from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.async_client import DEFAULT_TIMEOUT_S, AsyncClient
from mlxd.scheduler.errors import ConnectionLostError
from mlxd.scheduler.messages import StatusReply
from mlxd.scheduler.request_options import RequestOptions
from mlxd.scheduler.results import Completion, TextChunk
from mlxd.scheduler.transport import Connect

__all__ = ["AsyncClient", "Client", "Completion", "TextChunk"]

_T = TypeVar("_T")


class Client:
    """AsyncClient for code without asyncio: same arguments, same errors. Safe to use from several threads."""

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
        self._client = AsyncClient(
            endpoint,
            token=token,
            key=key,
            server_key=server_key,
            timeout_s=timeout_s,
            retries=retries,
            wait_s=wait_s,
            resume_s=resume_s,
            window_bytes=window_bytes,
            connect=connect,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mlxd-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection and the thread; a second call does nothing."""
        if self._loop.is_closed():
            return
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """The whole answer to a text, a conversation or token ids."""
        return self._run(self._client.generate(prompt, sampling, **options))

    def stream(
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generator[TextChunk, None, None]:
        """The answer piece by piece; closing the generator early cancels the request."""
        return self._each(self._client.stream(prompt, sampling, **options))

    def resume(self, request_id: str, seq: int = 0) -> Generator[TextChunk, None, None]:
        """The answer to a request that another connection made, from piece `seq` on."""
        return self._each(self._client.resume(request_id, seq))

    def _each(self, chunks: AsyncGenerator[TextChunk, None]) -> Generator[TextChunk, None, None]:
        # After a Ctrl-C the piece that was waited for is still on its way: closing has to wait for it.
        turn = asyncio.Lock()
        try:
            while (chunk := self._run(_next(chunks, turn))) is not None:
                yield chunk
        finally:
            if not self._loop.is_closed():
                self._run(_close(chunks, turn))

    def cancel(self, request_id: str) -> bool:
        """Whether the tenant had such an open request."""
        return self._run(self._client.cancel(request_id))

    def status(self) -> StatusReply:
        """The engine's state as this tenant may see it."""
        return self._run(self._client.status())

    def ping(self) -> str:
        """The daemon's state, told by its scheduler."""
        return self._run(self._client.ping())

    def drain(self) -> None:
        """Ask the daemon to finish and exit; an operator may."""
        self._run(self._client.drain())

    def reload(self) -> tuple[str, ...]:
        """Have the daemon read its file anew; an operator may. Returns a line a tenant that changed."""
        return self._run(self._client.reload())

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        if self._loop.is_closed():
            work.close()
            raise ConnectionLostError("the client is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


async def _next(chunks: AsyncGenerator[TextChunk, None], turn: asyncio.Lock) -> TextChunk | None:
    async with turn:
        return await anext(chunks, None)


async def _close(chunks: AsyncGenerator[TextChunk, None], turn: asyncio.Lock) -> None:
    async with turn:
        await chunks.aclose()
