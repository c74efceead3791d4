"""A door never blocks and never keeps more for a peer than it may."""

import asyncio
import ctypes
import math
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from watched_door import LIMIT, Watched, with_door
from wire_daemon import Peer

from mlxd.scheduler import door as door_module
from mlxd.scheduler import messages as wire
from mlxd.scheduler.config import TenantConfig
from mlxd.scheduler.door import Door
from mlxd.scheduler.events import Usage
from mlxd.scheduler.session import Session

ACME = TenantConfig(name="acme", token_sha256="0" * 64)


def done(number: int, size: int = 1000) -> wire.Done:
    return wire.Done(id=str(number), finish_reason="stop", usage=Usage(1, 1), text="x" * size)


def chunk(number: int) -> wire.Chunk:
    return wire.Chunk(id="c", seq=number, text="x" * 1000, token_ids=())


def fill(watched: Watched, session: Session) -> None:
    """Send chunks until the first one is held back."""
    for number in range(10_000):
        if session.outbox:
            return
        watched.door.send(session, chunk(number))
    raise AssertionError("the peer's connection takes everything")


def test_what_a_peer_does_not_take_is_kept_in_order_and_sent_later(tmp_path: Path) -> None:
    async def scenario(watched: Watched) -> None:
        with Peer(watched.address, rcvhwm=1) as peer:
            session = await watched.arrived(peer)
            fill(watched, session)
            watched.door.send(session, wire.Pong(id="last", state="running"))
            assert watched.door.buffered_bytes == session.outbox_bytes > 1000
            seqs = []
            while (message := peer.receive_any())["type"] == "chunk":
                seqs.append(message["seq"])
                watched.door.flush()
                await asyncio.sleep(0.001)
            assert seqs == list(range(len(seqs)))
            assert message["id"] == "last"
            assert (watched.door.buffered_bytes, watched.slow) == (0, [])

    with_door(tmp_path, scenario)


def test_a_full_outbox_takes_ends_of_requests_alone(tmp_path: Path) -> None:
    async def scenario(watched: Watched) -> None:
        with Peer(watched.address, rcvhwm=1) as peer:
            session = await watched.arrived(peer)
            fill(watched, session)
            for number in range(20):
                watched.door.send(session, chunk(number))
            assert watched.slow == [session]
            assert session.outbox_bytes <= LIMIT
            watched.door.send(session, done(1))
            watched.door.send(session, wire.Cancelled(id="2", usage=Usage(1, 1)))
            messages = [peer.receive_any()]
            while messages[-1].get("id") != "2":
                watched.door.flush()
                await asyncio.sleep(0.001)
                messages.append(peer.receive_any())
            assert [m["type"] for m in messages[-3:]] == ["chunk", "error", "cancelled"]
            assert (messages[-2]["id"], messages[-2]["code"]) == ("1", "slow_client")
            watched.door.flush()
            assert not session.slow
            watched.door.send(session, done(3))
            assert peer.receive_any()["text"] == "x" * 1000

    with_door(tmp_path, scenario)


def test_a_peer_that_takes_no_ends_either_is_given_up(tmp_path: Path) -> None:
    async def scenario(watched: Watched) -> None:
        with Peer(watched.address, rcvhwm=1) as peer:
            session = await watched.arrived(peer)
            fill(watched, session)
            for number in range(200):
                watched.door.send(session, done(number))
            assert (watched.slow, watched.gone) == ([session], [session])
            assert watched.door.buffered_bytes == 0

    with_door(tmp_path, scenario)


def test_a_peer_that_left_is_reported_once(tmp_path: Path) -> None:
    async def scenario(watched: Watched) -> None:
        with Peer(watched.address) as peer:
            session = await watched.arrived(peer)
        while not watched.gone:
            watched.door.send(session, chunk(0))
            await asyncio.sleep(0.001)
        watched.door.send(session, chunk(1))
        assert watched.gone == [session]

    with_door(tmp_path, scenario)


def connected(path: Path) -> socket.socket:
    silent = socket.socket(socket.AF_UNIX)
    silent.settimeout(5.0)
    silent.connect(str(path))
    return silent


def is_shut(silent: socket.socket) -> bool:
    """Whether the other side ends the connection; its greeting is skipped."""
    try:
        while silent.recv(64):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def test_the_oldest_stranger_goes_when_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "MAX_STRANGERS", 2)

    async def scenario(watched: Watched) -> None:
        with Peer(watched.address) as client, connected(tmp_path / "door") as silent:
            session = await watched.arrived(client)
            watched.door.admit(session, ACME)
            with connected(tmp_path / "door") as second, connected(tmp_path / "door") as third:
                assert await asyncio.to_thread(is_shut, silent)
                for kept in (second, third):
                    kept.settimeout(0.1)
                    assert not is_shut(kept)
            assert await watched.arrived(client) is session

    with_door(tmp_path, scenario)


def test_a_stranger_that_says_no_hello_is_shut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "HELLO_WITHIN_S", 0.0)

    async def scenario(watched: Watched) -> None:
        with Peer(watched.address) as client, Peer(watched.address) as stranger:
            kept = await watched.arrived(client)
            watched.door.admit(kept, ACME)
            session = await watched.arrived(stranger)
            await asyncio.sleep(0.001)
            watched.door.shut_strangers()
            while watched.gone != [session]:
                await asyncio.sleep(0.001)
            assert not kept.gone

    with_door(tmp_path, scenario)


def test_a_routing_id_taken_over_is_not_the_session_of_the_one_who_left(tmp_path: Path) -> None:
    async def scenario(watched: Watched) -> None:
        with Peer(watched.address, routing_id=b"ops") as peer:
            session = await watched.arrived(peer)
            watched.door.admit(session, ACME)
        heirs = await watched.claimed(lambda: Peer(watched.address, routing_id=b"ops"))
        assert heirs is not session
        assert heirs.tenant is None
        assert (session.gone, watched.gone[0]) == (True, session)
        assert not watched.door.clients

    with_door(tmp_path, scenario)


def test_nobody_can_tell_the_next_automatic_id(tmp_path: Path) -> None:
    ids = set()

    async def scenario(watched: Watched) -> None:
        with Peer(watched.address) as peer:
            ids.add((await watched.arrived(peer)).peer)

    for _ in range(2):
        ctypes.CDLL(None).srand(1)
        with_door(tmp_path, scenario)
    assert len(ids) == 2


class RawPeer(Peer):
    """A ZMTP 3 connection that claims any identity; libzmq's sockets can claim none that begins with 0."""

    def __init__(self, path: Path, identity: bytes) -> None:
        self._socket = connected(path)
        ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        ready += b"\x08Identity" + struct.pack(">I", len(identity)) + identity
        steps = [
            (b"\xff" + bytes(8) + b"\x7f", 10),
            (b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32), 54),
            (b"\x04" + bytes([len(ready)]) + ready, 40),
        ]
        for part, answer_bytes in steps:
            self._socket.sendall(part)
            while answer_bytes > 0:
                answer_bytes -= len(self._socket.recv(answer_bytes))

    def raw(self, *frames: bytes) -> None:
        (frame,) = frames
        self._socket.sendall(bytes([0, len(frame)]) + frame)


def test_a_forged_automatic_id_is_a_stranger_too(tmp_path: Path) -> None:
    async def scenario(watched: Watched) -> None:
        with Peer(watched.address) as peer:
            session = await watched.arrived(peer)
            watched.door.admit(session, ACME)
        forged = await watched.claimed(lambda: RawPeer(tmp_path / "door", session.peer))
        assert forged.peer == session.peer
        assert forged is not session
        assert forged.tenant is None

    with_door(tmp_path, scenario)


def test_frames_of_a_connection_that_is_closed_have_a_session_that_is_gone(tmp_path: Path) -> None:
    async def scenario(watched: Watched) -> None:
        with Peer(watched.address) as peer:
            session = await watched.arrived(peer)
            peer.raw(b"last")
            await asyncio.sleep(0.05)
        while not watched.gone:
            await asyncio.sleep(0.001)
        late, frames = await watched.door.receive()
        assert frames == [b"last"]
        assert late is not session
        assert late.gone

    with_door(tmp_path, scenario)


@pytest.mark.parametrize("routing_id", [b"", b"own"], ids=["automatic", "own"])
@pytest.mark.parametrize("fate", ["unheard", "admitted", "answered"])
def test_a_connection_is_its_own_though_the_one_before_it_left_a_frame_unread(
    fate: str, routing_id: bytes, tmp_path: Path
) -> None:
    def meet(door: Door, earlier: Session) -> None:
        if fate == "unheard":
            earlier.patience.deaf_until = math.inf
        else:
            door.admit(earlier, ACME)
        if fate == "answered":
            door.send(earlier, chunk(0))

    async def scenario(watched: Watched) -> None:
        with Peer(watched.address, routing_id=routing_id) as peer:
            before = await watched.arrived(peer)
            peer.raw(b"last")
            time.sleep(0.05)  # without a turn for the loop, so that the door does not hear of it
        while is_open_file(before.fd):
            time.sleep(0.001)
        with Peer(watched.address) as peer:
            peer.raw(b"first")
            while not is_open_file(before.fd):
                time.sleep(0.001)
            heard = {}
            for _ in range(2):
                session, (frame,) = await watched.door.receive()
                heard[frame] = session
                if frame == b"last" and not session.gone:
                    meet(watched.door, session)
            new, earlier = heard[b"first"], heard[b"last"]
            assert (new.fd, new.gone, new.tenant, new.patience.deaf_until) == (before.fd, False, None, 0.0)
            assert earlier.gone
            assert watched.door.clients == set()
            watched.door.admit(new, ACME)
            watched.door.send(earlier, chunk(0))
            watched.door.send(new, chunk(1))
            assert (await asyncio.to_thread(peer.receive))["seq"] == 1
            assert watched.door.clients == {new}

    with_door(tmp_path, scenario)


def test_losing_a_peer_that_left_does_not_close_what_has_its_file_descriptor_now(tmp_path: Path) -> None:
    async def scenario(watched: Watched) -> None:
        with Peer(watched.address) as peer:
            session = await watched.arrived(peer)
        while is_open_file(session.fd):
            time.sleep(0.001)  # without a turn for the loop, so that the door does not hear of it
        with connection_at(session.fd) as other_end:
            watched.door.lose(session)
            other_end.sendall(b"still open")
        assert watched.gone == [session]

    with_door(tmp_path, scenario)


def is_open_file(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@contextmanager
def connection_at(fd: int) -> Iterator[socket.socket]:
    """The other end of a connection that has this file descriptor here."""
    one_end, other_end = socket.socketpair()
    with one_end, other_end:
        os.dup2(one_end.fileno(), fd)
        try:
            yield other_end
        finally:
            os.close(fd)
