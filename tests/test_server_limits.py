"""What the daemon has no room for, and what it cannot tokenise, over real sockets."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from wire_daemon import Peer, daemon, runner, token, wait_until

from mlxd.batching.text import Tokenizer
from mlxd.batching.text_stream import TextStream


def test_one_id_belongs_to_each_tenant_separately(tmp_path: Path) -> None:
    with (
        daemon(tmp_path, runner=runner(0.005)) as served,
        served.submit("acme") as acme,
        served.submit("beta") as beta,
        served.control("beta") as control,
    ):
        for peer in (acme, beta):
            peer.send("generate", id="same", prompt="hi", sampling={"max_tokens": 100})
            assert peer.receive()["type"] == "accepted"
        assert control.ask("cancel", id="other")["result"] == "not_found"
        assert control.ask("cancel", id="same")["result"] == "cancelling"
        assert beta.until_terminal("same")[-1]["type"] == "cancelled"
        assert control.ask("cancel", id="same")["result"] == "not_found"
        assert acme.until_terminal("same")[-1]["type"] == "done"


def test_a_full_queue_is_an_answer_with_a_time_to_come_back(tmp_path: Path) -> None:
    limits = {"max_running": 1, "max_waiting": 2}
    with daemon(tmp_path, runner=runner(0.005), tenant=limits) as served, served.submit() as peer:
        for number in range(20):
            peer.send("generate", id=str(number), prompt="hi", sampling={"max_tokens": 10})
        ends = {}
        while len(ends) < 20:
            message = peer.receive()
            if message["type"] in ("done", "rejected"):
                ends[message["id"]] = message
        with served.submit("beta") as other:
            other.send("generate", id="a", prompt="hi", sampling={"max_tokens": 1})
            assert other.until_terminal("a")[-1]["type"] == "done"
    rejected = [m for m in ends.values() if m["type"] == "rejected"]
    assert 0 < 20 - len(rejected) <= 4
    assert all(m["reason"] == "queue_full" and m["retryable"] and m["retry_after_ms"] > 0 for m in rejected)


def test_a_tenant_with_many_clients_leaves_a_place_to_each_that_has_none(tmp_path: Path) -> None:
    with daemon(tmp_path, max_clients=8) as served, ExitStack() as held:

        def greeting(tenant: str) -> str:
            peer = held.enter_context(Peer(served.config.server.submit))
            reply = peer.ask("hello", v=1, token=token(tenant))
            return str(reply.get("code", reply["type"]))

        wait_until(lambda: served.metric("mlxd_clients_connected") == 0)
        assert [greeting("acme") for _ in range(7)] == ["hello"] * 6 + ["too_many_clients"]
        assert [greeting("beta") for _ in range(2)] == ["hello", "too_many_clients"]
        assert [greeting("admin") for _ in range(2)] == ["hello", "too_many_clients"]


def test_more_clients_than_allowed_are_turned_away(tmp_path: Path) -> None:
    with daemon(tmp_path, max_clients=2) as served:
        with served.submit(), served.submit(), Peer(served.config.server.submit) as third:
            assert third.ask("hello", v=1, token=token("acme"))["code"] == "too_many_clients"
            wait_until(lambda: served.metric("mlxd_clients_connected") == 2)
        wait_until(lambda: served.metric("mlxd_clients_connected") == 0)
        with served.submit():
            pass


class PoisonedTokenizer(Tokenizer):
    """Raises on prompts that say so, and on drawn tokens of prompts that say so."""

    def encode(self, text: str) -> list[int]:
        if text == "poison in":
            raise ZeroDivisionError("tokenizer")
        return super().encode(text)

    def stream(self, stop: Any = ()) -> TextStream:
        stream = super().stream([s for s in stop if s != "poison out"])
        if "poison out" in stop:

            def push(ids: Any) -> str:
                raise ZeroDivisionError("detokenizer")

            stream.push = push  # type: ignore[method-assign]
        return stream


@pytest.mark.parametrize("stream", [True, False])
def test_a_tokenizer_that_raises_ends_that_request_alone(tmp_path: Path, stream: bool) -> None:
    from text_tokenizers import byte_level

    text = PoisonedTokenizer(byte_level(), special_tokens={})
    with daemon(tmp_path, text=text) as served, served.submit() as peer:
        options = {"stream": stream, "sampling": {"max_tokens": 5}}
        peer.send("generate", id="good", prompt="hi", **options)
        peer.send("generate", id="in", prompt="poison in", **options)
        poisoned = {"stop": ["poison out"], "max_tokens": 50}
        peer.send("generate", id="out", prompt="hi", stream=stream, sampling=poisoned)
        ends = {}
        while len(ends) < 3:
            message = peer.receive()
            if message["type"] in ("done", "error"):
                ends[message["id"]] = message
        assert ends["good"]["type"] == "done"
        assert (ends["in"]["code"], ends["out"]["code"]) == ("internal", "internal")
        assert "ZeroDivision" not in ends["in"]["message"] + ends["out"]["message"]
        wait_until(lambda: served.engine.snapshot.running == 0)
