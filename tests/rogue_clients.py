"""Clients that do harm, each a process of its own: `python rogue_clients.py KIND SUBMIT CONTROL TENANT`.

It says "ready" once it is connected, begins when it reads a line, and tells how far it got.
"""

import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import zmq
from wire_daemon import Peer

NUM_REQUESTS = 6
NUM_BROKEN_FRAMES = 2_000
_FRAMES_A_CONNECTION = 20
_LONG = {"max_tokens": 6_000, "ignore_eos": True}


def vanish(submit: str, control: str, tenant: str) -> None:
    """Streams long answers until it is killed; says "streaming" when all of them flow."""
    with Peer(submit).hello(tenant) as peer:
        _begin()
        silent = {f"v{number}" for number in range(NUM_REQUESTS)}
        for request_id in silent:
            peer.send("generate", id=request_id, prompt="vanish", sampling=_LONG)
        while silent:
            message = peer.receive(60.0)
            if message["type"] == "chunk":
                silent.discard(message["id"])
        print("streaming", flush=True)
        while True:
            peer.receive(60.0)


def never_read(submit: str, control: str, tenant: str) -> None:
    """Asks for long answers with many numbers in each chunk, and reads none of them."""
    with Peer(submit, rcvhwm=1).hello(tenant) as peer:
        _begin()
        for number in range(NUM_REQUESTS):
            sampling = {**_LONG, "top_logprobs": 20}
            peer.send("generate", id=f"d{number}", prompt="never read", sampling=sampling)
        print("sent", flush=True)
        sys.stdin.readline()


def flood(submit: str, control: str, tenant: str) -> None:
    """Sends broken frames, half as a client and half as ever new strangers, and bytes that are no ZMTP."""
    frames = _broken_frames(random.Random(3))
    with Peer(submit).hello(tenant) as peer:
        _begin()
        for number in range(NUM_BROKEN_FRAMES // 2):
            if number % _FRAMES_A_CONNECTION == 0:
                _send_as_stranger((submit, control)[number % 3 == 0], frames)
                _send_garbage(submit)
            peer.raw(*next(frames))
        print("sent", flush=True)
        sys.stdin.readline()


def _begin() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def _send_as_stranger(endpoint: str, frames: Iterator[list[bytes]]) -> None:
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.connect(endpoint)
    for _ in range(_FRAMES_A_CONNECTION):
        stranger.send_multipart(next(frames))
    stranger.close(linger=10_000)


def _send_garbage(endpoint: str) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(endpoint.removeprefix("ipc://"))
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")


def _broken_frames(rng: random.Random) -> Iterator[list[bytes]]:
    """Messages that are none, without end; each is counted as one bad message."""
    good = msgspec.msgpack.encode({"type": "generate", "id": "x", "prompt": "hi", "sampling": {}})
    kinds: list[Callable[[], list[bytes]]] = [
        lambda: [b"\xc1" + rng.randbytes(rng.randrange(200))],
        lambda: [good[: rng.randrange(1, len(good))]],
        lambda: [good + b"\x00"],
        lambda: [good, b""],
        lambda: [b"", good],
        lambda: [b""],
        lambda: [b"\xdf\xff\xff\xff\xff"],
        lambda: [b"\x91" * rng.randrange(10, 1000)],
        lambda: [b'{"type": "generate", "id": "x", "prompt": "\xff"}'],
        lambda: [b'{"type": "hello", "v": 1, "token": "x", "token": "y"}'],
        lambda: [msgspec.msgpack.encode({"type": "generate", "id": "x", "prompt": "hi", "extra": 1})],
        lambda: [msgspec.msgpack.encode({"type": "generate", "id": 7, "prompt": "hi"})],
        lambda: [msgspec.json.encode({"type": "launch", "id": "x"})],
        lambda: [msgspec.json.encode(["generate"])],
    ]
    while True:
        yield rng.choice(kinds)()


class Rogue:
    """The process as its starter sees it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def wait_for(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{word}\n"

    def go_on(self) -> None:
        """Let it begin, or end."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@contextmanager
def rogue(kind: Callable[[str, str, str], None], submit: str, control: str, tenant: str) -> Iterator[Rogue]:
    """A rogue that has said "ready"; killed on the way out if it still runs."""
    command = [sys.executable, __file__, kind.__name__, submit, control, tenant]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            started = Rogue(process)
            started.wait_for("ready")
            yield started
        finally:
            process.kill()


if __name__ == "__main__":
    {"vanish": vanish, "never_read": never_read, "flood": flood}[sys.argv[1]](*sys.argv[2:])
