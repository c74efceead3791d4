"""Requests on their way to the engine."""

import asyncio
from collections.abc import Callable

from mlxd.scheduler.engine import Engine
from mlxd.scheduler.errors import MlxdError
from mlxd.scheduler.intake import RETRY_MS, Intake, Served
from mlxd.scheduler.open_streams import OpenStreams
from mlxd.scheduler.stream import Stream


class Beginnings:
    """Has prompts tokenised and hands the requests to the engine; runs on the asyncio thread."""

    def __init__(
        self,
        engine: Engine,
        streams: OpenStreams,
        *,
        on_refused: Callable[[Stream, MlxdError], None],
        on_unwanted: Callable[[Stream], None],
    ) -> None:
        """
        Args:
            on_refused: told of an open stream that the engine did not get, and why.
            on_unwanted: told of one that nobody will read.
        """
        self._engine = engine
        self._streams = streams
        self._on_refused = on_refused
        self._on_unwanted = on_unwanted
        self._intake = Intake()
        self._begun: set[asyncio.Task[None]] = set()
        self._later: dict[Stream, asyncio.TimerHandle] = {}

    def begin(self, stream: Stream, served: Served) -> None:
        """`stream` is open and has its message."""
        task = asyncio.create_task(self._submit(stream, served))
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)

    def begin_later(self, stream: Stream, served: Served) -> None:
        """Once more, where the engine had no room for it."""
        loop = asyncio.get_running_loop()
        self._later[stream] = loop.call_later(RETRY_MS / 1000, self._begin_again, stream, served)

    def _begin_again(self, stream: Stream, served: Served) -> None:
        del self._later[stream]
        if stream in self._streams and stream.transcript.terminal is None:
            self.begin(stream, served)

    def take_back(self, stream: Stream) -> bool:
        """Whether it was to begin later, and now never does; it still has to be told as ended."""
        timer = self._later.pop(stream, None)
        if timer is not None:
            timer.cancel()
        return timer is not None

    async def _submit(self, stream: Stream, served: Served) -> None:
        try:
            submission = await self._intake.prepare(stream, served)
            if stream not in self._streams:
                return
            if not stream.is_wanted:
                self._on_unwanted(stream)
                return
            self._engine.submit(submission)
        except MlxdError as error:
            if stream in self._streams:
                self._on_refused(stream, error)
            return
        if stream.end_as:
            self._engine.cancel(stream.key, stream.end_as)

    def close(self) -> None:
        """Begin nothing more."""
        for task in self._begun:
            task.cancel()
        for timer in self._later.values():
            timer.cancel()
        self._intake.close()
