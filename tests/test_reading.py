"""One session's messages keep their order and its cost is its own."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import cast

from mlxd.scheduler.door import Door
from mlxd.scheduler.reading import LARGE_BYTES, MAX_QUEUED_BYTES, TURN_S, Reader
from mlxd.scheduler.session import Session

LARGE = b"x" * (LARGE_BYTES + 1)
Take = Callable[[Session, list[bytes]], Awaitable[None]]


class FakeDoor:
    """What arrived, in the order in which the socket would give it."""

    def __init__(self) -> None:
        self.arrivals: asyncio.Queue[tuple[Session, list[bytes]]] = asyncio.Queue()

    def put(self, session: Session, *frames: bytes) -> None:
        for frame in frames:
            self.arrivals.put_nowait((session, [frame]))

    async def receive(self) -> tuple[Session, list[bytes]]:
        return await self.arrivals.get()


def read(scenario: Callable[[FakeDoor], Awaitable[None]], take: Take) -> None:
    async def run() -> None:
        door = FakeDoor()
        reading = asyncio.create_task(Reader(cast(Door, door), take).run())
        try:
            async with asyncio.timeout(5.0):
                await scenario(door)
        finally:
            reading.cancel()
            await asyncio.wait([reading])

    asyncio.run(run())


def test_a_large_message_holds_up_its_own_session_alone() -> None:
    taken: list[tuple[Session, bytes]] = []
    a, b = Session(), Session()

    async def scenario(door: FakeDoor) -> None:
        decoded = asyncio.Event()
        events[LARGE] = decoded
        door.put(a, LARGE, b"a2", b"a3")
        door.put(b, b"b1")
        while not taken:
            await asyncio.sleep(0)
        assert taken == [(b, b"b1")]
        decoded.set()
        while len(taken) < 4:
            await asyncio.sleep(0.001)
        assert taken[1:] == [(a, LARGE), (a, b"a2"), (a, b"a3")]

    events: dict[bytes, asyncio.Event] = {}

    async def take(session: Session, frames: list[bytes]) -> None:
        if frames[0] in events:
            await events[frames[0]].wait()
        taken.append((session, frames[0]))

    read(scenario, take)


def test_costly_messages_of_one_session_let_the_others_pass() -> None:
    order: list[Session] = []
    greedy, modest = Session(), Session()

    async def take(session: Session, frames: list[bytes]) -> None:
        order.append(session)
        if session is greedy:
            time.sleep(2 * TURN_S)

    async def scenario(door: FakeDoor) -> None:
        for _ in range(20):
            door.put(greedy, b"x")
            door.put(modest, b"y")
        while len(order) < 40:
            await asyncio.sleep(0.001)

    read(scenario, take)
    assert order[:21].count(modest) == 20


def test_a_session_far_ahead_holds_the_door_and_loses_nothing() -> None:
    taken: list[bytes] = []

    async def take(session: Session, frames: list[bytes]) -> None:
        await asyncio.sleep(0)
        taken.append(frames[0])

    async def scenario(door: FakeDoor) -> None:
        session = Session()
        frames = [bytes([number]) * (MAX_QUEUED_BYTES // 4) for number in range(20)]
        door.put(session, *frames)
        while len(taken) < 20:
            await asyncio.sleep(0)
        assert taken == frames

    read(scenario, take)
