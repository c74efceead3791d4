"""The blocking client: an AsyncClient on a thread of its own."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack

from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.async_client import DEFAULT_TIMEOUT_S, AsyncClient
from mlxd.scheduler.connection import CLOSED
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
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._lock = threading.Lock()
        self._is_closed = False
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name="mlxd-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection and the thread; whoever waits in another one gets ConnectionLostError.

        A second call does nothing.
        """
        with self._lock:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(self._closing.set)
                self._is_closed = True
        self._thread.join()

    def _serve(self) -> None:
        with self._runner:  # which ends what is left of the calls on its way out
            self._runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        await self._closing.wait()
        await self._client.close()

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
            with suppress(ConnectionLostError):
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
        with self._lock:  # what is begun before the loop is told to end, it still ends
            if self._is_closed:
                work.close()
                raise ConnectionLostError(CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise ConnectionLostError(CLOSED) from None
        except BaseException:
            future.cancel()
            raise


async def _next(chunks: AsyncGenerator[TextChunk, None], turn: asyncio.Lock) -> TextChunk | None:
    async with turn:
        return await anext(chunks, None)


async def _close(chunks: AsyncGenerator[TextChunk, None], turn: asyncio.Lock) -> None:
    async with turn:
        await chunks.aclose()
