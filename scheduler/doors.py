"""All sockets of a daemon: two on this machine, and with CURVE two more for everybody who has a key."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import zmq.asyncio

from mlxd.metrics.recorder import Recorder
from mlxd.scheduler import messages as wire
from mlxd.scheduler.config import ServerConfig
from mlxd.scheduler.door import FLUSH_INTERVAL_S, LINGER_MS, MAX_STRANGERS, Door
from mlxd.scheduler.keys import KeyPair, server_keys
from mlxd.scheduler.open_files import allow_open_files, check_open_files
from mlxd.scheduler.session import Session
from mlxd.scheduler.zap import Gatekeeper


@dataclass(frozen=True, slots=True)
class Entrance:
    """The two doors of one kind of client."""

    submit: Door
    control: Door


class Doors:
    """Owns the sockets and their context. Runs on the asyncio thread, `__init__` inside its loop.

    Args:
        may_enter: whether a public key is known.
        on_gone, on_slow, on_room: as a Door's.
    """

    def __init__(
        self,
        config: ServerConfig,
        recorder: Recorder,
        *,
        may_enter: Callable[[str], bool],
        on_gone: Callable[[Session], None],
        on_slow: Callable[[Session], None],
        on_room: Callable[[Session], None],
    ) -> None:
        """Binds; owns a file at each ipc address from here on.

        Raises:
            ConfigError: an address is taken or cannot be bound, or so many clients need more open files.
            SettingError: the key file is no good.
        """
        addresses = _addresses(config)
        check_open_files(config.max_clients, MAX_STRANGERS, allow_open_files(), 2 * len(addresses))
        self._context = zmq.asyncio.Context()
        self._entrances: dict[Door, Entrance] = {}
        with ExitStack() as undo:
            undo.callback(self._context.destroy, linger=0)
            self._gatekeeper = Gatekeeper(self._context, may_enter)
            undo.callback(self._gatekeeper.close)

            def open_door(address: str, keys: KeyPair | None) -> Door:
                door = Door(
                    self._context,
                    address,
                    config,
                    recorder,
                    on_gone=on_gone,
                    on_slow=on_slow,
                    on_room=on_room,
                    keys=keys,
                )
                undo.callback(door.close)
                return door

            for submit, control, keys in addresses:
                entrance = Entrance(open_door(submit, keys), open_door(control, keys))
                self._entrances |= {entrance.submit: entrance, entrance.control: entrance}
            undo.pop_all()

    def __iter__(self) -> Iterator[Door]:
        return iter(self._entrances)

    def entrance(self, door: Door) -> Entrance:
        """Where those come in who came through `door`."""
        return self._entrances[door]

    @property
    def submits(self) -> tuple[Door, ...]:
        return tuple(entrance.submit for entrance in dict.fromkeys(self._entrances.values()))

    @property
    def buffered_bytes(self) -> int:
        return sum(door.buffered_bytes for door in self)

    def send(self, session: Session, message: wire.ServerMessage) -> int:
        """Send to a client of a submit door, and to one that is gone, nothing; the frame's bytes."""
        for door in self.submits:
            if session in door.clients:
                return door.send(session, message)
        return 0

    async def run(self) -> None:
        """Send what waits, and answer ZAP, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._gatekeeper.run())
            for door in self:
                tasks.create_task(door.flush_forever())

    async def close(self) -> None:
        """Give clients LINGER_MS to take what they were sent, then close the sockets."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LINGER_MS / 1000
        while self.buffered_bytes and loop.time() < deadline:
            for door in self:
                door.flush()
            await asyncio.sleep(FLUSH_INTERVAL_S)
        for door in self:
            door.close()
        self._gatekeeper.close()

    async def term(self) -> None:
        """Wait until what the sockets took is sent, or LINGER_MS are over."""
        await asyncio.to_thread(self._context.term)


def _addresses(config: ServerConfig) -> list[tuple[str, str, KeyPair | None]]:
    """Of the submit and the control door of each entrance, and the daemon's keys where it is encrypted."""
    found: list[tuple[str, str, KeyPair | None]] = [(config.submit, config.control, None)]
    if config.curve is not None:
        found.append((config.curve.submit, config.curve.control, server_keys(config.curve)))
    return found
