"""The file of an ipc address: taken, kept and removed by the daemon that owns it."""

import asyncio
import fcntl
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
from watched_door import Watched, with_door
from wire_daemon import Peer

from mlxd.scheduler import socket_file
from mlxd.scheduler.errors import ConfigError
from mlxd.scheduler.socket_file import SocketFile


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


def test_of_two_daemons_that_start_at_once_one_has_the_socket_of_a_dead_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, looks = tmp_path / "s", socket_file._is_live
    first_looked, second_ended = Event(), Event()

    def look(path: Path) -> bool:
        is_live = looks(path)
        if not first_looked.is_set():
            first_looked.set()
            second_ended.wait(0.2)
        return is_live

    monkeypatch.setattr(socket_file, "_is_live", look)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(SocketFile, path)
        first_looked.wait()
        with pytest.raises(ConfigError, match="another daemon is listening there"):
            SocketFile(path)
        second_ended.set()
        first.result().remove()
        first.result().listener.close()


def test_a_folder_that_somebody_keeps_locked_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_file, "TURN_TRY_S", 0.001)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        made = SocketFile(tmp_path / "s")
        made.remove()
        made.listener.close()
    finally:
        os.close(folder)


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
