"""What bad input gets, over real sockets: one clear answer each, and nobody else notices."""

import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from wire_daemon import Daemon, Peer, daemon, runner, token, wait_until

MAX_BYTES = 2**21


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(
        tmp_path_factory.mktemp("d"), runner=runner(max_model_len=512), max_message_bytes=MAX_BYTES
    ) as running:
        yield running


def assert_serves(served: Daemon) -> None:
    with served.client("beta") as client:
        assert client.generate("still here?").usage.completion_tokens == 256


GENERATE: dict[str, Any] = {"type": "generate", "id": "r", "prompt": "hi"}


def body(**changes: Any) -> bytes:
    return msgspec.msgpack.encode({k: v for k, v in (GENERATE | changes).items() if v is not None})


def sampling(**fields: Any) -> bytes:
    return body(sampling=fields)


def at_fault(name: str) -> dict[str, Any]:
    """What the error has for this field of `sampling`."""
    return {"code": "invalid_param", "field": f"sampling.{name}"}


FRAMES: dict[str, tuple[list[bytes], dict[str, Any]]] = {
    "two frames": ([b"", body()], {"type": "error", "code": "malformed_frames"}),
    "three frames": ([b"a", b"b", b"c"], {"type": "error", "code": "malformed_frames"}),
    "garbage": ([b"\xc1\xff"], {"type": "error", "code": "decode"}),
    "empty": ([b""], {"type": "error", "code": "decode"}),
    "truncated": ([body()[:-1]], {"type": "error", "code": "decode"}),
    "duplicate key": ([b'{"type":"ping","type":"ping"}'], {"type": "error", "code": "decode"}),
    "NaN": ([b'{"type":"ping","x_a":NaN}'], {"type": "error", "code": "decode"}),
    "claims billions": ([b"\x81\xa4type\xdd\xff\xff\xff\xff"], {"type": "error", "code": "too_large"}),
    "too deep": ([b"\x81\xa3x_a" + b"\x91" * 99 + b"\x01"], {"type": "error", "code": "too_large"}),
    "long string": ([body(prompt="x" * (2**20 + 1))], {"type": "error", "code": "too_large"}),
    "unknown type": ([body(type="generat")], {"type": "error", "code": "unsupported", "id": "r"}),
    "unknown version": ([body(v=9)], {"type": "error", "code": "unsupported", "field": "v"}),
    "unknown field": ([body(temprature=1)], {"code": "invalid_param", "field": "temprature", "id": "r"}),
    "text for number": ([sampling(seed="5")], at_fault("seed")),
    "bool for number": ([sampling(top_k=True)], at_fault("top_k")),
    "temperature < 0": ([sampling(temperature=-0.1)], at_fault("temperature")),
    "top_p too small": ([sampling(top_p=9e-7)], at_fault("top_p")),
    "penalty too small": ([sampling(repetition_penalty=9e-7)], at_fault("repetition_penalty")),
    "top_p 0": ([sampling(top_p=0)], at_fault("top_p")),
    "top_p > 1": ([sampling(top_p=1.1)], at_fault("top_p")),
    "top_k < 0": ([sampling(top_k=-1)], at_fault("top_k")),
    "max_tokens < 0": ([sampling(max_tokens=-1)], at_fault("max_tokens")),
    "max_tokens huge": ([sampling(max_tokens=2**40)], at_fault("max_tokens")),
    "seed < 0": ([sampling(seed=-1)], at_fault("seed")),
    "seed > 64 bits": (
        [b'{"type":"generate","id":"r","prompt":"x","sampling":{"seed":18446744073709551616}}'],
        at_fault("seed"),
    ),
    "many stops": ([sampling(stop=["x"] * 17)], at_fault("stop")),
    "long stop": ([sampling(stop=["x" * 257])], at_fault("stop[0]")),
    "bias too high": (
        [sampling(logit_bias={5: 101})],
        at_fault("logit_bias[5]"),
    ),
    "bias outside": ([sampling(logit_bias={99999: 1})], at_fault("logit_bias")),
    "no prompt": ([body(prompt=None)], {"code": "invalid_param", "field": "prompt", "id": "r"}),
    "two prompts": ([body(token_ids=[1])], {"code": "invalid_param", "field": "prompt"}),
    "empty prompt": ([body(prompt="")], {"type": "error", "code": "invalid_prompt", "id": "r"}),
    "no ids": ([body(prompt=None, token_ids=[])], {"type": "error", "code": "invalid_prompt"}),
    "id outside": ([body(prompt=None, token_ids=[99999])], {"type": "error", "code": "invalid_prompt"}),
    "id < 0": ([body(prompt=None, token_ids=[-1])], {"type": "error", "code": "invalid_prompt"}),
    "no template": (
        [body(prompt=None, messages=[{"role": "user", "content": "hi"}])],
        {"type": "error", "code": "invalid_prompt", "id": "r"},
    ),
    "never fits": ([sampling(max_tokens=600)], {"reason": "never_fits", "retryable": False, "id": "r"}),
    "text never fits": (
        [body(prompt="x" * 20_000)],
        {"reason": "never_fits", "message": "a text of 20000 characters is beyond a context of 512 tokens"},
    ),
    "cancel unknown": (
        [msgspec.msgpack.encode({"type": "cancel", "id": "r"})],
        {"type": "ok", "id": "r", "result": "not_found"},
    ),
    "drain by a tenant": (
        [msgspec.msgpack.encode({"type": "drain", "id": "r"})],
        {"type": "error", "code": "forbidden", "id": "r"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("frames", "expected"), FRAMES.values(), ids=FRAMES)
def test_bad_input_gets_its_one_answer(served: Daemon, frames: list[bytes], expected: dict[str, Any]) -> None:
    with served.submit() as peer:
        peer.raw(*frames)
        reply = peer.receive()
        assert reply | expected == reply
        assert reply["v"] == 1
        assert peer.ask("ping", id="after")["type"] == "pong", "there was a second answer"


def test_the_daemon_serves_as_before_after_all_that(served: Daemon) -> None:
    assert_serves(served)
    assert served.metric("mlxd_zmq_bad_messages_total", reason="decode") >= 5


def test_replies_come_in_the_encoding_of_the_question(served: Daemon) -> None:
    with served.submit() as peer:
        peer.raw(b'{"type":"cancel","id":"\xc3\xa9"}')
        assert peer._socket.recv() == b'{"type":"ok","v":1,"id":"\xc3\xa9","result":"not_found"}'
        peer.send("cancel", id="x")
        assert msgspec.msgpack.decode(peer._socket.recv())["result"] == "not_found"


def test_a_frame_over_the_socket_limit_closes_that_connection_alone(served: Daemon) -> None:
    with served.submit() as peer, served.submit("beta") as other:
        peer.raw(b"x" * (MAX_BYTES + 1))
        assert other.ask("ping")["type"] == "pong"
        wait_until(lambda: peer.ask("ping").get("code") == "unauthenticated")
    assert_serves(served)


def test_generate_is_taken_on_the_submit_socket_alone(served: Daemon) -> None:
    with served.control() as peer:
        reply = peer.ask("generate", id="r", prompt="hi")
    assert (reply["code"], reply["id"]) == ("unsupported", "r")


def test_the_welcome_tells_the_limits(served: Daemon) -> None:
    with Peer(served.config.server.submit) as peer:
        welcome = peer.ask("hello", v=1, token=token("acme"), client="test")
    assert welcome["tenant"] == "acme"
    assert welcome["versions"] == [1, 1]
    assert welcome["control"] == served.config.server.control
    assert welcome["limits"]["max_message_bytes"] == MAX_BYTES
    assert welcome["limits"]["max_model_len"] == 512
    assert welcome["epoch"]


def test_socket_files_are_their_owners_alone(served: Daemon) -> None:
    for address in (served.config.server.submit, served.config.server.control):
        mode = Path(address.removeprefix("ipc://")).stat().st_mode
        assert stat.S_IMODE(mode) & 0o077 == 0


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("hello", {"v": 1, "token": "wrong"}),
        ("hello", {"v": 1, "token": ""}),
        ("hello", {"v": 1, "token": "acme"}),
        ("generate", {"id": "r", "prompt": "hi"}),
        ("cancel", {"id": "r"}),
        ("status", {}),
        ("drain", {}),
    ],
)
def test_strangers_get_one_same_answer(served: Daemon, kind: str, fields: dict[str, Any]) -> None:
    with Peer(served.config.server.submit) as peer:
        assert peer.ask(kind, **fields) == {
            "type": "error",
            "v": 1,
            "code": "unauthenticated",
            "message": "no valid credential",
        }
        peer.hello("acme")


def test_a_client_must_not_set_a_routing_id(served: Daemon) -> None:
    with Peer(served.config.server.submit, routing_id=b"ops") as peer:
        for kind, fields in (("hello", {"v": 1, "token": token("acme")}), ("ping", {})):
            reply = peer.ask(kind, **fields)
            assert (reply["code"], reply["message"]) == ("unsupported", "a client must not set a routing id")


@pytest.mark.parametrize(
    "frames",
    [[b"\xc1"], [b"", b"{}"], [b'{"type": "generate"'], [body(secret=1)], [body(prompt="x" * 5000)]],
    ids=["garbage", "two frames", "truncated", "unknown field", "5,000 bytes"],
)
def test_what_strangers_send_is_told_no_one(served: Daemon, frames: list[bytes]) -> None:
    with Peer(served.config.server.submit) as peer:
        peer.raw(*frames)
        reply = peer.receive()
    assert (reply["code"], reply["message"]) == ("unauthenticated", "no valid credential")


def test_a_stranger_that_sends_much_is_shut(served: Daemon) -> None:
    with Peer(served.config.server.submit) as peer:
        peer.raw(body(prompt="x" * 5000))
        assert peer.receive()["code"] == "unauthenticated"
        wait_until(lambda: try_hello(peer))


def try_hello(peer: Peer) -> bool:
    """Whether this peer's connection, or the one after it, is listened to."""
    peer.send("hello", v=1, token=token("acme"))
    try:
        return peer.receive(0.1)["type"] == "hello"
    except AssertionError:
        return False


def test_a_stranger_is_told_which_versions_there_are(served: Daemon) -> None:
    with Peer(served.config.server.submit) as peer:
        assert peer.ask("hello", v=2, token="x")["code"] == "unsupported"


def test_each_wrong_credential_is_answered_later_than_the_one_before(served: Daemon) -> None:
    waits = []
    with Peer(served.config.server.submit) as peer:
        for _ in range(3):
            asked = time.monotonic()
            peer.ask("hello", v=1, token="guess")
            waits.append(time.monotonic() - asked)
    assert waits[0] >= 0.1
    assert waits[1] >= 0.2
    assert waits[2] >= 0.4


def test_a_connection_stays_with_its_tenant(served: Daemon) -> None:
    with served.submit("acme") as peer:
        assert peer.ask("hello", v=1, token=token("beta"))["code"] == "forbidden"
        peer.hello("acme")


def test_an_open_id_is_a_conflict_and_the_open_request_goes_on(served: Daemon) -> None:
    with served.submit() as peer:
        peer.send("generate", id="twice", prompt="hi", sampling={"max_tokens": 200})
        peer.send("generate", id="twice", prompt="hi")
        messages = peer.until_terminal("twice")
        assert (messages[-1]["type"], messages[-1]["reason"]) == ("rejected", "id_conflict")
        rest = [*messages[:-1], *peer.until_terminal("twice")]
    assert rest[-1]["type"] == "done"
    assert sum(len(m["token_ids"]) for m in rest if m["type"] == "chunk") == 200
