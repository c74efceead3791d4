"""The file of an ipc address: taken, kept and removed by the daemon that owns it."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from watched_door import Watched, with_door
from wire_daemon import Peer

from mlxd.scheduler.errors import ConfigError


def test_a_live_daemons_socket_is_not_taken_and_a_dead_ones_is(tmp_path: Path) -> None:
    async def scenario(watched: Watched) -> None:
        with pytest.raises(ConfigError, match=r"door: another daemon is listening there"):
            watched.open()
        with Peer(watched.address) as peer:
            await watched.arrived(peer)

    with_door(tmp_path, scenario)
    assert not (tmp_path / "door").exists()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "door"))
    with_door(tmp_path, lambda watched: asyncio.sleep(0))


def test_a_closing_door_leaves_the_socket_of_the_daemon_after_it(tmp_path: Path) -> None:
    async def scenario(watched: Watched) -> None:
        (tmp_path / "door").unlink()
        after = watched.open()
        watched.door.close()
        watched.door = after
        await asyncio.sleep(0.05)
        assert (tmp_path / "door").is_socket()
        with Peer(watched.address) as peer:
            await watched.arrived(peer)

    with_door(tmp_path, scenario)
    assert not (tmp_path / "door").exists()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_text("mine"), "not a socket"),
        (lambda path: path.parent.rmdir(), "the folder .* does not exist"),
    ],
)
def test_other_things_in_the_way_are_named(tmp_path: Path, make: Callable[[Path], None], words: str) -> None:
    folder = tmp_path / "sub"
    folder.mkdir()
    make(folder / "door")
    with pytest.raises(ConfigError, match=words):
        with_door(folder, lambda watched: asyncio.sleep(0))
