"""Clients by the hundred, each a process of its own, killed at one instant.

`python crowd.py SUBMIT TENANT CLIENTS` says "streaming" once every client reads an answer, kills all of them
when it reads a line, then says "killed".
"""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from daemon_process import DaemonProcess
from scraping import is_at_rest
from wire_daemon import Peer, token, wait_until

_START_S = 120.0
_LONG = {"max_tokens": 3_000, "ignore_eos": True}


def stream(submit: str, tenant: str, started: int) -> None:
    """Read long answers without end; the descriptor `started` gets a byte when they flow, and is closed."""
    with Peer(submit) as peer:
        peer.send("hello", v=1, token=token(tenant))
        for number in itertools.count():
            while (message := peer.receive(_START_S))["type"] in ("chunk", "accepted"):
                if message["type"] == "chunk" and number == 1 and message["seq"] == 0:
                    os.write(started, b".")
                    os.close(started)
            assert message["type"] in ("hello", "done"), message
            peer.send("generate", id=f"{os.getpid()}-{number}", prompt="hello", sampling=_LONG)


def main(submit: str, tenant: str, num_clients: int) -> None:
    reading, writing = os.pipe()
    clients: list[int] = []
    for _ in range(num_clients):
        if (pid := os.fork()) == 0:
            os.close(reading)
            stream(submit, tenant, writing)
        clients.append(pid)
    os.close(writing)
    try:
        num_streaming = 0
        while num_streaming < num_clients and (bytes_read := os.read(reading, num_clients)):
            num_streaming += len(bytes_read)
        print("streaming" if num_streaming == num_clients else "failed", flush=True)
        sys.stdin.readline()
    finally:
        for pid in clients:
            os.kill(pid, signal.SIGKILL)
        print("killed", flush=True)
        for pid in clients:
            os.waitpid(pid, 0)


@contextmanager
def crowd(daemon: DaemonProcess, tenant: str, num_clients: int) -> Iterator["subprocess.Popen[str]"]:
    """Clients that all read their answers."""
    command = (sys.executable, __file__, daemon.config.server.submit, tenant, str(num_clients))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            expect(process, "streaming")
            yield process
        finally:
            if process.poll() is None:
                process.communicate("\n")


def expect(process: "subprocess.Popen[str]", word: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == f"{word}\n"


def seconds_to_rest(daemon: DaemonProcess, num_clients: int) -> float:
    """From the kill of so many clients, all in the middle of an answer, until the daemon holds nothing."""
    with crowd(daemon, "acme", num_clients) as process:
        wait_until(lambda: daemon.scrape().total("mlxd_requests_running") == num_clients)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        expect(process, "killed")
        killed_at = time.monotonic()
        wait_until(lambda: is_at_rest(daemon.scrape()), 60.0)
        return time.monotonic() - killed_at


if __name__ == "__main__":
    main(*sys.argv[1:3], int(sys.argv[3]))
