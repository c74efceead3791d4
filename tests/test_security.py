"""What tenants and strangers may try against a daemon, over its real sockets: docs/security.md tells it."""

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import msgspec
import pytest
import zmq
from curve_daemon import KEYS, SERVER, CurveDaemon, KeyPeer, curve_daemon, relayed
from wire_daemon import Daemon, Peer, config, runner, token, wait_until

from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler import door
from mlxd.scheduler.door import MAX_STRANGERS
from mlxd.scheduler.tokens import token_hash

FOREVER = {"max_tokens": 4000, "ignore_eos": True}
FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
MAX_BYTES = 2**16


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CurveDaemon]:
    """It waits for strangers for less time than others."""
    folder = tmp_path_factory.mktemp("curve")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(door, "HELLO_WITHIN_S", 1.0)
        patch.setattr(door, "HANDSHAKE_MS", 500)
        with curve_daemon(folder, runner=runner(0.001), max_message_bytes=MAX_BYTES) as daemon:
            yield daemon


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """On ipc alone; its tenants have keys, too."""
    folder = tmp_path_factory.mktemp("ipc")
    made = config(folder, max_message_bytes=MAX_BYTES)
    tenants = tuple(msgspec.structs.replace(t, public_key=KEYS[t.name].public) for t in made.tenants)
    with Daemon(msgspec.structs.replace(made, tenants=tenants), runner(0.001)) as daemon:
        yield daemon.wait_ready()


def assert_serves(daemon: Daemon, within_s: float = 5.0) -> None:
    began = time.monotonic()
    with daemon.client("beta") as client:
        assert client.generate("hi", SamplingParams(max_tokens=2)).usage.completion_tokens == 2
    assert time.monotonic() - began < within_s


def tcp_address(daemon: CurveDaemon) -> tuple[str, int]:
    host, port = daemon.curve.submit.removeprefix("tcp://").split(":")
    return host, int(port)


def is_closed(connection: socket.socket, within_s: float) -> bool:
    """Whether the other side ends it; what it says before is skipped."""
    deadline = time.monotonic() + within_s
    try:
        while (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            if not connection.recv(4096):
                return True
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return False


@pytest.mark.parametrize(
    "wrong", ["", "guess", token("acme")[:-1], token("acme").upper(), token_hash(token("acme"))]
)
def test_every_wrong_token_gets_the_same_answer(local: Daemon, wrong: str) -> None:
    with Peer(local.config.server.submit) as peer:
        reply = peer.ask("hello", v=1, token=wrong)
        assert reply == {"type": "error", "v": 1, "code": "unauthenticated", "message": "no valid credential"}


class ClaimingPeer(Peer):
    """A ZMTP 3 peer without encryption whose greeting claims metadata, as libzmq's own sockets cannot."""

    def __init__(self, path: str, **claims: str) -> None:
        self._stream = socket.socket(socket.AF_UNIX)
        self._stream.settimeout(5.0)
        self._stream.connect(path)
        ready = b"\x05READY"
        for name, value in ({"Socket-Type": "DEALER"} | claims).items():
            ready += bytes([len(name)]) + name.encode() + struct.pack(">I", len(value)) + value.encode()
        self._stream.sendall(
            b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        )
        self._stream.sendall(b"\x04" + bytes([len(ready)]) + ready)
        self._take(64)
        self._take(self._take(2)[1])

    def _take(self, count: int) -> bytes:
        taken = b""
        while len(taken) < count:
            taken += self._stream.recv(count - len(taken))
        return taken

    def raw(self, *frames: bytes) -> None:
        (frame,) = frames
        self._stream.sendall(bytes([0, len(frame)]) + frame)

    def receive_any(self, timeout_s: float = 5.0) -> dict[str, Any]:
        flags, size = self._take(2)
        assert not flags, "a short message of one frame"
        return msgspec.msgpack.decode(self._take(size))  # type: ignore[no-any-return]

    def __exit__(self, *exc: object) -> None:
        self._stream.close()


def test_a_user_id_in_a_greeting_proves_nothing(local: Daemon) -> None:
    path = local.config.server.submit.removeprefix("ipc://")
    with ClaimingPeer(path, **{"User-Id": KEYS["admin"].public}) as peer:
        assert peer.ask("hello", v=1)["code"] == "unauthenticated"
        assert peer.ask("ping")["code"] == "unauthenticated"


@pytest.mark.parametrize("kind", ["encrypted", "local"])
def test_a_stolen_routing_id_gets_nothing_of_its_owner(kind: str, request: pytest.FixtureRequest) -> None:
    daemon: Daemon = request.getfixturevalue(kind)
    hello = {"v": 1, "token": "" if kind == "encrypted" else token("acme")}
    with owner_of(daemon, b"victim") as owner:
        assert owner.ask("hello", **hello)["code"] == "unsupported"
        with owner_of(daemon, b"victim") as thief:
            thief.send("hello", **hello)
            assert thief.is_silent()
    assert_serves(daemon)


def owner_of(daemon: Daemon, routing_id: bytes) -> Peer:
    if isinstance(daemon, CurveDaemon):
        return KeyPeer(daemon.curve.submit, KEYS["acme"], routing_id=routing_id)
    return Peer(daemon.config.server.submit, routing_id=routing_id)


@pytest.mark.parametrize("kind", ["encrypted", "local"])
def test_another_tenants_requests_can_be_neither_seen_nor_touched(
    kind: str, request: pytest.FixtureRequest
) -> None:
    daemon: Daemon = request.getfixturevalue(kind)
    with daemon.submit("acme") as victim, daemon.submit("beta") as thief, daemon.control("beta") as control:
        victim.send("generate", id="r", prompt="hi", sampling=FOREVER)
        assert [victim.receive()["type"] for _ in range(2)] == ["accepted", "chunk"]
        assert (
            control.ask("cancel", id="r")["result"]
            == control.ask("cancel", id="none")["result"]
            == "not_found"
        )
        status = control.ask("status")
        assert (set(status["tenants"]), status["running"], status["waiting"]) == ({"beta"}, 0, 0)
        assert control.ask("drain", id="d")["code"] == control.ask("reload", id="d")["code"] == "forbidden"
        thief.send("generate", id="r", prompt="hi", sampling={"max_tokens": 3})
        assert {message["type"] for message in thief.until_terminal("r")} == {"accepted", "chunk", "done"}
        assert victim.receive()["type"] == "chunk"
        victim.send("cancel", id="r")
        assert {"cancelled"} <= {message["type"] for message in victim.until_terminal("r")}


def test_a_status_is_the_same_before_while_and_after_others_work(local: Daemon) -> None:
    def seen() -> dict[str, Any]:
        with local.control("acme") as peer:
            reply = peer.ask("status")
        return {name: value for name, value in reply.items() if name not in ("uptime_s", "id")}

    before = seen()
    with local.submit("beta") as other:
        other.send("generate", id="work", prompt="a prompt", sampling=FOREVER)
        assert [other.receive()["type"] for _ in range(2)] == ["accepted", "chunk"]
        assert seen() == before
        other.send("cancel", id="work")
        other.until_terminal("work")
    assert seen() == before
    assert before["tenants"]["acme"]["service"] is None, "it is raised to what others got"


def test_a_tenant_cannot_tell_what_another_one_sent(encrypted: CurveDaemon) -> None:
    def cached(tenant: str) -> int:
        with encrypted.client(tenant) as client:
            return client.generate("one prompt " * 60, SamplingParams(max_tokens=2)).usage.cached_tokens

    assert cached("acme") == 0
    assert cached("acme") > 0
    assert cached("beta") == 0
    assert encrypted.metric("mlxd_prefix_hit_tokens_total", tenant="acme") > 0
    assert encrypted.metric("mlxd_prefix_hit_tokens_total", tenant="beta") == 0


@pytest.mark.parametrize("again", ["the same bytes", "a flipped bit"])
def test_a_replayed_or_changed_frame_ends_the_connection_and_does_nothing(
    encrypted: CurveDaemon, again: str
) -> None:
    before = encrypted.metric("mlxd_requests_accepted_total", tenant="admin")
    with relayed(encrypted.curve.submit, "admin") as (peer, relay):
        peer.send("hello", v=1)
        list(relay.until(lambda: not peer.is_silent(0)))
        peer.send("generate", id="r", prompt="hi", sampling={"max_tokens": 2})
        frame = relay.from_client()
        if again == "the same bytes":
            relay.server.sendall(frame)
        else:
            frame = frame[:-1] + bytes([frame[-1] ^ 1])
        relay.server.sendall(frame)
        assert is_closed(relay.server, 2.0)
    with encrypted.client("admin") as client:
        client.generate("hi", SamplingParams(max_tokens=2))
    accepted = encrypted.metric("mlxd_requests_accepted_total", tenant="admin") - before
    assert accepted <= (2 if again == "the same bytes" else 1)


def test_a_recorded_connection_cannot_be_played_again(encrypted: CurveDaemon) -> None:
    with relayed(encrypted.curve.submit, "admin") as (peer, relay):
        peer.send("hello", v=1)
        list(relay.until(lambda: not peer.is_silent(0)))
        recorded = b"".join(relay.sent)
    with socket.create_connection(tcp_address(encrypted)) as again:
        again.sendall(recorded)
        assert is_closed(again, 2.0)


def test_a_frame_over_the_limit_ends_its_connection_alone(encrypted: CurveDaemon) -> None:
    with encrypted.submit("acme") as other, KeyPeer(encrypted.curve.submit, KEYS["acme"]) as peer:
        assert peer.ask("hello", v=1)["type"] == "hello"
        peer.raw(b"x" * (MAX_BYTES + 1))
        peer.events(zmq.EVENT_DISCONNECTED)
        assert other.ask("ping")["type"] == "pong"


@pytest.mark.parametrize(
    "bomb",
    [
        b'{"type": "generate", "id": "r", "prompt": ' + b"[" * 30_000,
        b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        b"\x91" * 60_000,
        b"\x81\xa1a" * 20_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ],
    ids=["json lists", "json maps", "msgpack lists", "msgpack maps", "length", "size", "bytes"],
)
def test_a_nesting_bomb_costs_an_error(encrypted: CurveDaemon, bomb: bytes) -> None:
    with encrypted.submit("acme") as peer:
        began = time.monotonic()
        peer.raw(bomb)
        assert peer.receive()["code"] in ("too_large", "decode")
        assert time.monotonic() - began < 1.0
        assert peer.ask("ping")["type"] == "pong"


def _greeting() -> bytes:
    """The first bytes of a ZMTP 3.0 connection that asks for CURVE."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)


def _curve_hello() -> bytes:
    """A HELLO command that no key opens."""
    body = b"\x05HELLO\x01\x00" + bytes(72) + b"\x01" * 32 + bytes(8) + b"\x02" * 80
    return b"\x04" + bytes([len(body)]) + body


FLOODS = {
    "silence": b"",
    "half a greeting": _greeting()[:20],
    "a greeting": _greeting(),
    "a hello that no key opens": _greeting() + _curve_hello(),
    "no zmtp": b"GET / HTTP/1.1\r\n\r\n" * 10,
    "plain": b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"PLAIN".ljust(20, b"\0") + bytes(32),
}


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_of_handshakes_shuts_nobody_out(encrypted: CurveDaemon, kind: str) -> None:
    with ExitStack() as held, encrypted.submit("acme") as client:
        connections = []
        for _ in range(MAX_STRANGERS + 100):
            connection = held.enter_context(socket.create_connection(tcp_address(encrypted)))
            with suppress(ConnectionError):
                connection.sendall(FLOODS[kind])
            connections.append(connection)
        assert_serves(encrypted)
        assert client.ask("ping")["type"] == "pong"
        assert all(is_closed(connection, 4.0) for connection in connections)


def test_a_flood_of_unknown_keys_shuts_nobody_out(encrypted: CurveDaemon) -> None:
    stranger = type(SERVER).make()
    with ExitStack() as held:
        peers = [held.enter_context(KeyPeer(encrypted.curve.submit, stranger)) for _ in range(100)]
        assert_serves(encrypted)
        for peer in peers:
            peer.events(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    wait_until(lambda: encrypted.metric("mlxd_zmq_bad_messages_total", reason="unauthenticated") >= 100)
