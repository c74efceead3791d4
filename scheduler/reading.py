"""Reads a door: what one session sends never holds up the others for longer than one message takes."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from mlxd.scheduler.door import Door
from mlxd.scheduler.session import Session

LARGE_BYTES = 2**13
"""Messages above are read beside the door's reader, in their session's order."""
TURN_S = 0.005
"""How long messages may be handled at a stretch before everyone else has a turn."""
REST = 3
"""A session whose message took longer than a turn is not read for so many times as long, ..."""
MAX_REST_S = 0.1
"""... up to this: the door may wait for it."""
MAX_QUEUED_BYTES = 2**20
"""What a session may have sent ahead; with more, the door itself waits for it."""


def size_of(frames: list[bytes]) -> int:
    return sum(map(len, frames))


@dataclass(slots=True)
class _Queue:
    """What a session sent while an earlier message of it is at work, or while it rests."""

    messages: deque[list[bytes]] = field(default_factory=deque)
    num_bytes: int = 0
    has_room: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_full(self) -> bool:
        return self.num_bytes > MAX_QUEUED_BYTES

    def put(self, frames: list[bytes]) -> None:
        self.messages.append(frames)
        self.num_bytes += size_of(frames)
        if self.is_full:
            self.has_room.clear()

    def get(self) -> list[bytes]:
        frames = self.messages.popleft()
        self.num_bytes -= size_of(frames)
        if not self.is_full:
            self.has_room.set()
        return frames


class Reader:
    """`take` handles one message; it must not suspend for those up to LARGE_BYTES."""

    def __init__(self, door: Door, take: Callable[[Session, list[bytes]], Awaitable[None]]) -> None:
        self._door = door
        self._take = take
        self._queues: dict[Session, _Queue] = {}

    async def run(self) -> None:
        """Read until cancelled."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            turn_began = loop.time()
            while True:
                session, frames = await self._door.receive()
                if (queue := self._queues.get(session)) is not None:
                    queue.put(frames)
                    if queue.is_full:
                        await queue.has_room.wait()
                elif size_of(frames) > LARGE_BYTES:
                    tasks.create_task(self._work(session, self._queue(session, frames), 0.0))
                elif (rest_s := await self._handle(session, frames)) > 0:
                    tasks.create_task(self._work(session, self._queue(session), rest_s))
                if loop.time() - turn_began > TURN_S:
                    # Receiving what has arrived already never yields to the other tasks.
                    await asyncio.sleep(0)
                    turn_began = loop.time()

    def _queue(self, session: Session, *messages: list[bytes]) -> _Queue:
        queue = self._queues[session] = _Queue()
        for frames in messages:
            queue.put(frames)
        return queue

    async def _work(self, session: Session, queue: _Queue, rest_s: float) -> None:
        """Handle what the session sent and sends meanwhile, until there is nothing left."""
        await asyncio.sleep(rest_s)
        while queue.messages:
            rest_s = await self._handle(session, queue.get())
            await asyncio.sleep(0 if queue.is_full else rest_s)
        del self._queues[session]
        queue.has_room.set()

    async def _handle(self, session: Session, frames: list[bytes]) -> float:
        """Seconds that this session has to rest now."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self._take(session, frames)
        took_s = loop.time() - began
        return min(REST * took_s, MAX_REST_S) if took_s > TURN_S else 0.0
