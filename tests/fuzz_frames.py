"""Frames that are almost messages, and a process that sends them.

`python fuzz_frames.py SUBMIT CONTROL TENANT FRAMES SEED` prints how many are handled so far, line by line.
"""

import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import msgspec
import zmq
from wire_daemon import token

MAX_MESSAGE_BYTES = 2**16
"""What the daemon that is fuzzed takes, so that a frame over it costs little."""
FRAMES_A_VOLLEY = 20
"""As many bad frames as a connection may send at once; of more the daemon reads none for a second."""
_VOLLEYS_AT_ONCE = 16
_ASK_AGAIN_S = 0.1
_GIVE_UP_S = 30.0

Message = dict[Any, Any]

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 5, 2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64 - 1, -(2**63)),
    *(0.0, -0.0, 0.5, 1e-300, 1e308, float("nan"), float("inf"), float("-inf")),
    *("", "hi", "5", "\0", "é𝄞\u202e", "x" * 129, "x" * 9_000),
    *([], {}, [[]], [None] * 20, [0] * 600, [[[[[[[[[1]]]]]]]]], {"a": {"b": {"c": {}}}}, {1: 2}),
)
MSGPACK_VALUES = (*VALUES, b"bytes", msgspec.msgpack.Ext(5, b"ext"))
JSON_VALUES = (*VALUES, 2**64, -(10**400))
NAMES = ("", "id", "type", "v", "prompt", "sampling", "x_note", "temprature", "\0", "k" * 200, 7)
CLAIMS = tuple(bytes([lead]) + b"\xff" * 4 for lead in (0xDB, 0xDD, 0xDF))
"""Headers of a text, a list and a map of four billion."""
BYTES = (*CLAIMS, b"\xc1", b"\0", b'"', b"\\ud800")


class Mutator:
    """Valid messages of every kind, each changed at one to three places; the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._number = 0

    def frames(self) -> list[bytes]:
        """The parts of one multipart message of a client that said hello."""
        return self._mutated(self._message())

    def greeting(self) -> list[bytes]:
        """The same for a stranger's first message."""
        return self._mutated({"type": "hello", "v": 1, "token": "x" * 64, "client": "fuzz"})

    def _mutated(self, message: Message) -> list[bytes]:
        choose = self._random.random()
        is_json = self._random.random() < 0.4
        if choose < 0.7:
            for _ in range(self._random.randint(1, 3)):
                self._change(message, JSON_VALUES if is_json else MSGPACK_VALUES)
        frame = _json(message) if is_json else msgspec.msgpack.encode(message)
        if choose < 0.7:
            return [frame]
        if choose < 0.75:
            return [self._with_a_key_twice(frame, is_json)]
        if choose < 0.92:
            for _ in range(self._random.randint(1, 3)):
                frame = self._garbled(frame)
            return [frame]
        return self._in_parts(frame)

    def _message(self) -> Message:
        self._number += 1
        kind = self._random.choices(["generate", "cancel", "status", "ping", "drain"], [16, 2, 1, 1, 1])[0]
        message: Message = {"type": kind, "id": f"f{self._number}"}
        if kind == "generate":
            message |= self._random.choice(
                [
                    {"prompt": "hello there"},
                    {"token_ids": [1, 2, 3, 4]},
                    {"messages": [{"role": "user", "content": "hello"}]},
                ]
            )
            message["sampling"] = self._sampling()
            message["stream"] = self._random.random() < 0.5
        return message

    def _sampling(self) -> Message:
        """Some of its fields, in range; answers are short, so that those that stay valid cost little."""
        draw = self._random
        fields: Message = {
            "temperature": draw.uniform(0, 2),
            "top_p": draw.uniform(0.1, 1),
            "top_k": draw.randrange(50),
            "min_p": draw.random(),
            "repetition_penalty": draw.uniform(0.5, 2),
            "presence_penalty": draw.uniform(-2, 2),
            "frequency_penalty": draw.uniform(-2, 2),
            "logit_bias": {str(draw.randrange(50)): draw.uniform(-100, 100)},
            "seed": draw.getrandbits(64),
            "stop": ["a", "bc"],
            "stop_token_ids": [1, 2],
            "ignore_eos": True,
            "top_logprobs": draw.randrange(21),
        }
        kept = draw.sample(sorted(fields), draw.randrange(4))
        return {"max_tokens": draw.randint(1, 3)} | {name: fields[name] for name in kept}

    def _change(self, message: Message, values: tuple[Any, ...]) -> None:
        """One place of it: another value, another name, less, or more."""
        place = self._random.choice(_containers(message))
        value = deepcopy(self._random.choice(values))
        if isinstance(place, list):
            place.insert(self._random.randint(0, len(place)), value)
            return
        names = list(place)
        op = self._random.choice(("set", "set", "set", "drop", "rename", "add", "wrap")) if names else "add"
        name = self._random.choice(names) if names else ""
        if op == "set":
            place[name] = value
        elif op == "drop":
            del place[name]
        elif op == "rename":
            place[self._random.choice(NAMES)] = place.pop(name)
        elif op == "wrap":
            place[name] = [place[name]]
        else:
            place[self._random.choice(NAMES)] = value

    def _with_a_key_twice(self, frame: bytes, is_json: bool) -> bytes:
        if is_json:
            return frame[:-1] + b',"type":"ping"}'
        entry = b"".join(map(msgspec.msgpack.encode, ("type", "ping")))
        return bytes([frame[0] + 1]) + frame[1:] + entry

    def _garbled(self, frame: bytes) -> bytes:
        at = self._random.randint(0, len(frame))
        to = self._random.randint(at, min(len(frame), at + 16))
        ways: list[Callable[[], bytes]] = [
            lambda: frame[:at],
            lambda: frame[:at] + frame[to:],
            lambda: frame[:to] + frame[at:],
            lambda: frame[:at] + self._random.choice(BYTES) + frame[at:],
            lambda: frame[:at] + self._random.choice(BYTES) + frame[to:],
            lambda: frame[:at] + self._random.randbytes(to - at) + frame[to:],
            lambda: self._random.randbytes(self._random.randrange(64)),
            lambda: frame + b"\x91" * self._random.randrange(1, 2_000),
        ]
        return self._random.choice(ways)()

    def _in_parts(self, frame: bytes) -> list[bytes]:
        at = self._random.randint(0, len(frame))
        ways: list[Callable[[], list[bytes]]] = [
            lambda: [b"", frame],
            lambda: [frame, b""],
            lambda: [frame[:at], frame[at:]],
            lambda: [frame] * self._random.randint(2, 40),
            lambda: [
                self._random.randbytes(self._random.randrange(40)) for _ in range(self._random.randint(2, 9))
            ],
            lambda: [frame.ljust(MAX_MESSAGE_BYTES + 1, b" ")] if self._random.random() < 0.05 else [b""],
        ]
        return self._random.choice(ways)()


def _containers(value: Any) -> list[Any]:
    """All maps and lists of it, itself first."""
    if isinstance(value, dict):
        return [value, *(inner for item in value.values() for inner in _containers(item))]
    if isinstance(value, list):
        return [value, *(inner for item in value for inner in _containers(item))]
    return []


def _json(message: Message) -> bytes:
    """NaN and integers of any size as Python writes them."""
    return json.dumps(message, ensure_ascii=False).encode()


class Volley:
    """Frames over one connection, and a last question whose answer shows that all of them were handled."""

    def __init__(self, endpoint: str, tenant: str, number: int) -> None:
        """`tenant`: empty for a stranger."""
        self._last_id = f"volley {number}"
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(endpoint)
        if tenant:
            self._send(type="hello", v=1, token=token(tenant))

    def _send(self, **fields: Any) -> None:
        self._socket.send(msgspec.msgpack.encode(fields))

    def fire(self, frames: list[bytes]) -> None:
        self._socket.send_multipart(frames)

    def ask(self) -> None:
        self._send(type="cancel", id=self._last_id)

    def finish(self) -> None:
        """Wait for the answer; a stranger's, and one whose connection was closed, is "unauthenticated"."""
        deadline = time.monotonic() + _GIVE_UP_S
        while not self._is_answered():
            assert time.monotonic() < deadline, "the daemon does not answer"
            self.ask()  # the one before may have come while nothing was read
        self._socket.close(linger=0)

    def _is_answered(self) -> bool:
        while self._socket.poll(int(_ASK_AGAIN_S * 1000)):
            frame = self._socket.recv()
            reply = (msgspec.json if frame[:1] == b"{" else msgspec.msgpack).decode(frame)
            if reply.get("code") == "unauthenticated" or reply.get("id") == self._last_id:
                return True
        return False


def send(submit: str, control: str, tenant: str, num_frames: int, seed: int) -> None:
    """Every 16th volley is a stranger's, every 8th of the others ends with a second greeting."""
    mutator = Mutator(seed)
    volleys: deque[Volley] = deque()
    for number, begun in enumerate(range(0, num_frames, FRAMES_A_VOLLEY)):
        is_stranger = number % 16 == 15
        volley = Volley(control if number % 4 == 3 else submit, "" if is_stranger else tenant, number)
        for index in range(min(FRAMES_A_VOLLEY, num_frames - begun)):
            is_greeting = index == (0 if is_stranger else FRAMES_A_VOLLEY - 1 if number % 8 == 0 else -1)
            volley.fire(mutator.greeting() if is_greeting else mutator.frames())
        volley.ask()
        volleys.append(volley)
        if len(volleys) == _VOLLEYS_AT_ONCE:
            volleys.popleft().finish()
            print(begun, flush=True)
    for volley in volleys:
        volley.finish()
    print(num_frames, flush=True)


if __name__ == "__main__":
    send(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]))
