"""Over CURVE a client is its key's tenant; whatever is wrong with a key, the handshake fails."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from curve_daemon import KEYS, SERVER, CurveDaemon, KeyPeer, curve_daemon, relayed
from wire_daemon import token, wait_until

from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler import cli
from mlxd.scheduler.client import Client
from mlxd.scheduler.errors import ConfigError, UnauthenticatedError
from mlxd.scheduler.keys import KeyPair, write_keys

FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
STRANGER = KeyPair.make()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CurveDaemon]:
    with curve_daemon(tmp_path_factory.mktemp("curve")) as daemon:
        yield daemon


def test_a_client_with_keys_is_served_as_its_keys_tenant(served: CurveDaemon) -> None:
    for tenant in ("acme", "beta"):
        with served.client(tenant) as client:
            assert client.generate("hello", SamplingParams(max_tokens=3)).usage.completion_tokens == 3
            assert set(client.status().tenants) == {tenant}


def test_the_verbs_take_keys_from_files(
    served: CurveDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, _ = write_keys(tmp_path, "acme", KEYS["acme"])
    _, server = write_keys(tmp_path, "server", SERVER)
    options = ["--endpoint", served.curve.submit, "--key", str(secret), "--server-key", str(server)]
    assert cli.run(["status", *options]) == 0
    assert "acme" in capsys.readouterr().out
    monkeypatch.setenv("MLXD_KEY", str(secret))
    monkeypatch.setenv("MLXD_SERVER_KEY", str(server))
    assert cli.run(["generate", *options[:2], "--max-tokens", "2", "hi"]) == 0
    secret.chmod(0o644)
    assert cli.run(["status", *options]) == 2
    assert "acme.key: has mode 0644" in capsys.readouterr().err


BAD_KEYS = {
    "another server's key": (KEYS["acme"], STRANGER.public),
    "an unknown key": (STRANGER, SERVER.public),
    "a public key without its secret": (KeyPair(KEYS["acme"].public, STRANGER.secret), SERVER.public),
    "no key": (None, ""),
}


@pytest.mark.parametrize("name", BAD_KEYS)
def test_a_bad_key_ends_the_handshake_and_gets_no_message(served: CurveDaemon, name: str) -> None:
    keys, server_key = BAD_KEYS[name]
    with KeyPeer(served.curve.submit, keys, server_key) as peer:
        peer.send("hello", v=1, token=token("acme"))
        peer.events(FAILED)
        assert peer.is_silent()


def test_without_the_secret_nobody_learns_whether_a_public_key_is_known(served: CurveDaemon) -> None:
    answers = set()
    for public in (KEYS["acme"].public, KeyPair.make().public):
        with KeyPeer(served.curve.submit, KeyPair(public, STRANGER.secret)) as peer:
            answers.add(peer.events(FAILED)[-1])
    assert len(answers) == 1


@pytest.mark.parametrize("name", set(BAD_KEYS) - {"a public key without its secret"})
def test_a_client_with_a_bad_key_is_told_soon(served: CurveDaemon, name: str) -> None:
    keys, server_key = BAD_KEYS[name]
    login = {"token": token("acme")} if keys is None else {"key": keys.secret, "server_key": server_key}
    with (
        Client(served.curve.submit, timeout_s=5.0, **login) as client,
        pytest.raises(UnauthenticatedError, match=r"the handshake with tcp://.* failed: no valid credential"),
    ):
        client.ping()


def test_a_token_on_a_curve_connection_is_no_credential(served: CurveDaemon) -> None:
    with KeyPeer(served.curve.submit, KEYS["acme"]) as peer:
        reply = peer.ask("hello", v=1, token=token("acme"))
        assert (reply["type"], reply["code"]) == ("error", "unauthenticated")


def test_a_claimed_tenant_must_be_the_keys(served: CurveDaemon) -> None:
    with KeyPeer(served.curve.submit, KEYS["acme"]) as peer:
        reply = peer.ask("hello", v=1, tenant="beta")
        assert (reply["code"], reply["field"]) == ("forbidden", "tenant")
        assert peer.ask("hello", v=1, tenant="acme")["tenant"] == "acme"


def test_before_hello_a_known_key_may_ask_nothing(served: CurveDaemon) -> None:
    with KeyPeer(served.curve.control, KEYS["admin"]) as peer:
        assert peer.ask("status")["code"] == "unauthenticated"


def test_refused_keys_are_counted(served: CurveDaemon) -> None:
    before = served.metric("mlxd_zmq_bad_messages_total", reason="unauthenticated")
    with KeyPeer(served.curve.submit, STRANGER) as peer:
        peer.events(FAILED)
    assert served.metric("mlxd_zmq_bad_messages_total", reason="unauthenticated") > before


def test_failed_handshakes_are_counted(served: CurveDaemon) -> None:
    before = served.metric("mlxd_zmq_bad_messages_total", reason="handshake")
    with KeyPeer(served.curve.submit, KEYS["acme"], STRANGER.public) as peer:
        peer.events(FAILED)
    wait_until(lambda: served.metric("mlxd_zmq_bad_messages_total", reason="handshake") > before)


def test_nothing_of_a_message_is_readable_on_its_way(served: CurveDaemon) -> None:
    with relayed(served.curve.submit) as (peer, relay):
        peer.send("hello", v=1, client="find-me-in-the-clear")
        passed = b"".join(relay.until(lambda: not peer.is_silent(0)))
        assert peer.receive()["type"] == "hello"
    assert len(passed) > 500
    assert b"find-me-in-the-clear" not in passed
    assert b"heartbeat_ms" not in passed


@pytest.mark.parametrize(
    ("login", "words"),
    [
        ({}, "no credential"),
        ({"key": STRANGER.secret}, "the key is given and the server's key is missing"),
        ({"server_key": SERVER.public}, "the server's key is given and the key is missing"),
        ({"token": "t", "key": STRANGER.secret, "server_key": SERVER.public}, "a token and a key are given"),
        ({"key": "x", "server_key": SERVER.public}, "the secret key is no key"),
        ({"key": STRANGER.secret, "server_key": "x"}, "the server's key is 'x': that is no key"),
        ({"key": Path("/nowhere"), "server_key": SERVER.public}, "/nowhere: cannot be read"),
    ],
)
def test_a_login_that_is_none_is_named(login: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Client("tcp://127.0.0.1:1", **login)


@pytest.mark.parametrize(
    ("endpoint", "login", "words"),
    [
        ("ipc:///x", {"key": STRANGER.secret, "server_key": SERVER.public}, "keys are for tcp://"),
        ("tcp://10.0.0.1:7000", {"token": "t"}, "beyond this machine a token could be read"),
    ],
)
def test_a_login_that_does_not_go_with_the_endpoint_is_never_sent(
    endpoint: str, login: dict[str, str], words: str
) -> None:
    with Client(endpoint, **login) as client, pytest.raises(ConfigError, match=words):
        client.ping()
