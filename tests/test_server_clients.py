"""Clients that vanish, do not read or flood: they lose their own requests, and others lose nothing."""

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from wire_daemon import Daemon, Peer, daemon, runner, token, wait_until

from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler import frontend
from mlxd.scheduler.door import MAX_STRANGERS
from mlxd.scheduler.errors import ConnectionLostError
from mlxd.scheduler.login import Login
from mlxd.scheduler.messages import ClientMessage
from mlxd.scheduler.protocol import decode
from mlxd.scheduler.reading import LARGE_BYTES
from mlxd.scheduler.transport import ZmqTransport

VICTIM = """
import sys
from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.client import Client
with Client(sys.argv[1], token=sys.argv[2]) as client:
    for chunk in client.stream("hi", SamplingParams(max_tokens=3000)):
        print("chunk", flush=True)
"""


def running(served: Daemon) -> int:
    return served.engine.snapshot.running


def ended(served: Daemon, outcome: str) -> float:
    return served.metric("mlxd_requests_total", tenant="acme", outcome=outcome)


def test_a_killed_clients_rows_end_within_a_second(tmp_path: Path) -> None:
    with daemon(tmp_path, runner=runner(0.01), heartbeat_ms=500) as served:
        command = [sys.executable, "-c", VICTIM, served.config.server.submit, token("acme")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
            assert victim.stdout is not None
            assert victim.stdout.readline() == "chunk\n"
            os.kill(victim.pid, signal.SIGKILL)
            killed = time.monotonic()
        wait_until(lambda: running(served) == 0)
        assert time.monotonic() - killed < 1.0
        assert ended(served, "client_gone") == 1


def test_clients_that_leave_while_nothing_streams_are_noticed_and_forgotten(tmp_path: Path) -> None:
    with daemon(tmp_path, runner=runner(0.01), tenant={"max_running": 1}) as served:
        with served.submit() as first, served.submit() as second, served.submit() as idle:
            first.send("generate", id="a", prompt="hi", sampling={"max_tokens": 100})
            second.send("generate", id="b", prompt="hi", sampling={"max_tokens": 100})
            assert first.receive()["type"] == "accepted"
            assert second.receive()["type"] == "accepted"
            wait_until(lambda: served.metric("mlxd_clients_connected") == 3)
            second._socket.close()
            idle._socket.close()
            wait_until(lambda: ended(served, "client_gone") == 1, 1.0)
            assert first.until_terminal("a")[-1]["type"] == "done"
        wait_until(lambda: served.metric("mlxd_clients_connected") == 0)


@pytest.mark.parametrize(
    "message",
    [
        {"type": "generate", "id": "a", "prompt": "x" * 2000, "x_pad": "x" * 10_000},
        {"type": "hello", "v": 1, "token": token("acme"), "x_pad": "x" * 10_000},
    ],
    ids=["generate", "hello"],
)
def test_what_was_being_read_when_its_client_left_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: dict[str, Any]
) -> None:
    arrived, resume = threading.Event(), threading.Event()

    def slow_decode(frame: bytes, max_bytes: int) -> ClientMessage:
        if len(frame) > LARGE_BYTES:
            arrived.set()
            resume.wait(5.0)
        return decode(frame, max_bytes)

    monkeypatch.setattr(frontend, "decode", slow_decode)
    with daemon(tmp_path) as served:
        with served.submit() as leaving:
            leaving.send(**message)
            assert arrived.wait(5.0)
            wait_until(lambda: served.metric("mlxd_clients_connected") == 1)
        wait_until(lambda: served.metric("mlxd_clients_connected") == 0)
        resume.set()
        wait_until(lambda: served.metric("mlxd_zmq_bad_messages_total", reason="ignored") == 1)
        with served.submit() as next_client:
            next_client.send("generate", id="b", prompt="hi", sampling={"max_tokens": 1})
            assert next_client.until_terminal("b")[-1]["type"] == "done"
            wait_until(lambda: served.metric("mlxd_clients_connected") == 1)
        assert served.metric("mlxd_requests_accepted_total", tenant="acme") == 1


def test_requests_that_yield_nothing_show_signs_of_life(tmp_path: Path) -> None:
    with (
        daemon(tmp_path, runner=runner(hang_at_step=1), heartbeat_ms=50) as served,
        served.submit() as peer,
    ):
        assert peer.receive_any() == {"type": "keepalive", "v": 1, "state": "idle"}
        peer.send("generate", id="a", prompt="hi", sampling={"max_tokens": 1})
        alive = {"type": "keepalive", "v": 1, "id": "a", "state": "waiting"}
        wait_until(lambda: peer.receive_any() == alive)
        assert peer.receive_any() == alive
        served.runner.resume.set()
        assert peer.until_terminal("a")[-1]["type"] == "done"


def test_ping_is_the_schedulers_own_answer(tmp_path: Path) -> None:
    with daemon(tmp_path, runner=runner(hang_at_step=1)) as served, served.submit() as peer:
        peer.send("generate", id="a", prompt="hi", sampling={"max_tokens": 1})
        assert peer.receive()["type"] == "accepted"
        assert served.runner.hangs.wait(10)
        with served.control() as control:
            for number in range(9):
                control.send("ping", id=str(number))
            busy = control.receive()
            assert (busy["code"], busy["id"]) == ("busy", "8")
            assert control.ask("status")["type"] == "status"
            served.runner.resume.set()
            assert [control.receive()["id"] for _ in range(8)] == [str(n) for n in range(8)]


def test_a_client_that_never_reads_loses_its_requests_alone(tmp_path: Path) -> None:
    with (
        daemon(tmp_path, runner=runner(0.0005), max_client_buffer_bytes=4096, retention_s=1.0) as served,
        served.submit("acme", rcvhwm=1) as slow,
        served.client("beta") as client,
    ):
        for number in range(8):
            slow.send("generate", id=str(number), prompt="hi", sampling={"max_tokens": 4000})
        wait_until(lambda: ended(served, "slow_client") > 0, 10.0)
        assert client.generate("hi", SamplingParams(max_tokens=50)).usage.completion_tokens == 50
        assert served.metric("mlxd_client_buffer_bytes") <= 3 * 4096
        ends = {}
        while len(ends) < 8:
            message = slow.receive()
            if message["type"] in ("done", "error"):
                assert message["id"] not in ends
                ends[message["id"]] = message.get("code", "done")
        assert "slow_client" in ends.values()
        slow.send("generate", id="again", prompt="hi", sampling={"max_tokens": 5})
        assert slow.until_terminal("again")[-1]["type"] == "done"


def test_connections_that_say_nothing_shut_nobody_out(tmp_path: Path) -> None:
    with (
        daemon(tmp_path, runner=runner(0.002)) as served,
        served.client("acme") as client,
        ExitStack() as silent,
    ):
        path = served.config.server.submit.removeprefix("ipc://")
        connections = [silent.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3 * MAX_STRANGERS)]
        stream = client.stream("hi", SamplingParams(max_tokens=100))
        next(stream)
        for connection in connections:
            connection.connect(path)
        assert sum(len(chunk.token_ids) for chunk in stream) >= 99
        wait_until(lambda: sum(is_open(connection) for connection in connections) <= MAX_STRANGERS)
        with served.submit("beta") as other:
            assert other.ask("ping")["type"] == "pong"


def is_open(connection: socket.socket) -> bool:
    """Skips what ZMTP greets with."""
    try:
        while connection.recv(64, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return True
    except ConnectionResetError:
        pass
    return False


def test_2000_broken_frames_disturb_no_one(tmp_path: Path) -> None:
    with (
        daemon(tmp_path, runner=runner(0.002)) as served,
        served.submit("beta") as flooder,
        served.client("acme") as client,
    ):
        prompt, sampling = "hi", SamplingParams(max_tokens=150, seed=5)
        expected = client.generate(prompt, sampling)
        arrivals = []
        ids: list[int] = []
        for number, chunk in enumerate(client.stream(prompt, sampling)):
            if number == 5:
                for _ in range(1000):
                    flooder.raw(b"\xc1")
                    flooder.raw(b"{", b"}", b"")
            arrivals.append(time.monotonic())
            ids += chunk.token_ids
        assert tuple(ids) == expected.token_ids
        assert max(b - a for a, b in itertools.pairwise(arrivals)) < 1.0
        answers = [flooder.receive()["code"] for _ in range(21)]
        assert answers[:20] == ["decode", "malformed_frames"] * 10
        assert answers[20] == "flood"
        wait_until(lambda: bad_frames(served) == 2000)
        wait_until(lambda: "pong" in str(try_ping(flooder)))


def bad_frames(served: Daemon) -> float:
    reasons = ("decode", "malformed_frames", "ignored")
    return sum(served.metric("mlxd_zmq_bad_messages_total", reason=reason) for reason in reasons)


def try_ping(peer: Peer) -> object:
    """The answer, or None from a daemon that does not listen to this peer for now."""
    peer.send("ping", id="p")
    time.sleep(0.1)
    try:
        return peer.receive(0.1)
    except AssertionError:
        return None


async def receive_all(transport: ZmqTransport) -> None:
    while True:
        await transport.receive()


def test_a_client_notices_that_its_daemon_ended(tmp_path: Path) -> None:
    async def scenario(served: Daemon) -> None:
        login = Login(token("acme"))
        transport = await ZmqTransport.connect(served.config.server.submit, login, timeout_s=5.0)
        served.server.request_drain()
        with pytest.raises(ConnectionLostError, match="the daemon closed the connection"):
            await asyncio.wait_for(receive_all(transport), 5.0)
        await transport.close()

    with daemon(tmp_path) as served:
        asyncio.run(scenario(served))
