"""Calls that end when what they wait on does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mlxd.scheduler.errors import ConnectionLostError, MlxdError


class Lifetime:
    """Ends with an error, and with the same one all calls that are under way."""

    def __init__(self) -> None:
        self._calls: set[asyncio.Timeout] = set()
        self._error: MlxdError | None = None

    @property
    def error(self) -> MlxdError | None:
        """Why it ended; None: it did not."""
        return self._error

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Work that may wait.

        Raises:
            ConnectionLostError: it was over, or is over now. Whatever is waited for within is cancelled.
        """
        if self._error is not None:
            raise ConnectionLostError(str(self._error)) from self._error
        call = asyncio.timeout(None)
        try:
            async with call:
                self._calls.add(call)
                try:
                    yield
                finally:
                    self._calls.remove(call)
        except TimeoutError:
            if not call.expired():
                raise
            raise ConnectionLostError(str(self._error)) from self._error

    def end(self, error: MlxdError) -> None:
        """Only the first one counts."""
        if self._error is None:
            self._error = error
            for call in self._calls:
                call.reschedule(0.0)
