"""A door on a real socket, and what it reported."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import zmq
import zmq.asyncio
from wire_daemon import Peer

from mlxd.metrics.recorder import NullRecorder
from mlxd.scheduler.config import ServerConfig
from mlxd.scheduler.door import Door
from mlxd.scheduler.session import Session

LIMIT = 4096


class Watched:
    """A door and what it reported."""

    def __init__(self, folder: Path, context: zmq.asyncio.Context) -> None:
        self.context = context
        self.address = f"ipc://{folder}/door"
        self.slow: list[Session] = []
        self.gone: list[Session] = []
        self.room: list[Session] = []
        self.door = self.open()

    def open(self) -> Door:
        config = ServerConfig(max_client_buffer_bytes=LIMIT, max_clients=4)
        return Door(
            self.context,
            self.address,
            config,
            NullRecorder(),
            on_gone=self.gone.append,
            on_slow=self.slow.append,
            on_room=self.room.append,
        )

    async def claimed(self, claim: Callable[[], Peer]) -> Session:
        """Whom a claimed routing id gets us; libzmq ignores who claims one before it has let go of it."""
        while True:
            with suppress(TimeoutError), claim() as heir:
                heir.raw(b"hello")
                async with asyncio.timeout(0.1):
                    return (await self.door.receive())[0]

    async def arrived(self, peer: Peer) -> Session:
        peer.raw(b"hello")
        session, frames = await self.door.receive()
        assert frames == [b"hello"]
        return session


def with_door(folder: Path, scenario: Callable[[Watched], Awaitable[None]]) -> None:
    async def run() -> None:
        with zmq.asyncio.Context() as context:
            watched = Watched(folder, context)
            async with asyncio.timeout(5.0):
                await scenario(watched)
            watched.door.close()

    asyncio.run(run())
