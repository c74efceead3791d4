"""Requests that outlive a connection: the same message again, resume, takeover, credit, retention."""

import asyncio
import time
from pathlib import Path

import pytest
from severed import Relay
from wire_daemon import daemon, runner, token, tokenizer, wait_until

from mlxd.batching.fake_runner import fake_completion
from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.async_client import AsyncClient
from mlxd.scheduler.client import Client
from mlxd.scheduler.errors import ConnectionLostError, RequestFailedError

TOKENIZER = tokenizer()
BODY = {"prompt": "hello", "sampling": {"max_tokens": 60, "seed": 3}}
EXPECTED = fake_completion(TOKENIZER.encode("hello"), 3, 60, TOKENIZER.vocab_size)
SLOW_STEP_S = 0.01


def tokens(messages: list[dict[str, object]]) -> list[int]:
    return [token for m in messages if m["type"] == "chunk" for token in m["token_ids"]]  # type: ignore[attr-defined]


def text(messages: list[dict[str, object]]) -> str:
    return "".join(str(m["text"]) for m in messages if m["type"] == "chunk")


def test_the_same_message_again_is_the_same_answer(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, served.submit() as peer, served.submit() as other:
        unseeded = {"prompt": "hello", "sampling": {"max_tokens": 60}}
        peer.send("generate", id="a", **unseeded)
        first = peer.until_terminal("a")
        for again in (peer, other):
            again.send("generate", id="a", **unseeded)
            messages = again.until_terminal("a")
            assert (messages[0]["type"], messages[1]["seq"]) == ("accepted", 0)
            assert len(messages) <= 4
            assert (tokens(messages), text(messages)) == (tokens(first), text(first))
            assert messages[-1] == first[-1]
        assert served.metric("mlxd_requests_accepted_total", tenant="acme") == 1


def test_another_body_under_a_kept_id_is_a_conflict(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, served.submit() as peer, served.submit("beta") as beta:
        peer.send("generate", id="a", **BODY)
        peer.until_terminal("a")
        peer.send("generate", id="a", **BODY, stream=False)
        assert peer.until_terminal("a")[-1]["reason"] == "id_conflict"
        beta.send("generate", id="a", **BODY, stream=False)
        assert beta.until_terminal("a")[-1]["token_ids"] == EXPECTED


@pytest.mark.parametrize("seq", [0, 1, 59, 60, 61, 1000])
def test_an_ended_request_is_told_from_any_piece_on(tmp_path: Path, seq: int) -> None:
    with daemon(tmp_path) as served, served.submit() as peer:
        peer.send("generate", id="a", **BODY)
        whole = peer.until_terminal("a")
        peer.send("resume", id="a", seq=seq)
        messages = peer.until_terminal("a")
        chunks = [m for m in messages if m["type"] == "chunk"]
        assert [m["type"] for m in messages][-1] == "done"
        assert tokens(messages) == EXPECTED[seq:]
        assert chunks == [] or chunks[0]["seq"] == seq
        if seq <= 1:
            head = [m for m in whole if m["type"] == "chunk"][:seq]
            assert text(head) + text(messages) == text(whole)


def test_a_running_request_moves_to_the_connection_that_resumes_it(tmp_path: Path) -> None:
    with daemon(tmp_path, runner=runner(SLOW_STEP_S)) as served, served.submit() as first:
        first.send("generate", id="a", **BODY)
        head = [first.receive() for _ in range(6)]
        with served.submit() as second:
            second.send("resume", id="a", seq=5)
            rest = second.until_terminal("a")
        last = first.until_terminal("a")[-1]
    assert (last["type"], last["code"]) == ("error", "taken_over")
    assert tokens(head) + tokens(rest) == EXPECTED
    assert rest[-1]["type"] == "done"


def test_a_request_goes_on_without_its_client_for_the_grace_and_no_longer(tmp_path: Path) -> None:
    with daemon(tmp_path, runner=runner(SLOW_STEP_S), resume_grace_s=5.0) as served:
        with served.submit() as first:
            first.send("generate", id="a", **BODY)
            head = [first.receive() for _ in range(4)]
        time.sleep(0.3)
        with served.submit() as second:
            second.send("resume", id="a", seq=3)
            rest = second.until_terminal("a")
    assert tokens(head) + tokens(rest) == EXPECTED
    with daemon(tmp_path, runner=runner(SLOW_STEP_S), resume_grace_s=0.3) as served:
        with served.submit() as first:
            first.send("generate", id="a", prompt="hello", sampling={"max_tokens": 2000})
            first.receive()
        left = time.monotonic()
        wait_until(lambda: served.metric("mlxd_requests_total", tenant="acme", outcome="client_gone") == 1)
        assert 0.2 < time.monotonic() - left < 1.5
        with served.submit() as second:
            assert second.ask("resume", id="a", seq=0)["code"] == "gone"


def test_what_is_not_kept_is_gone_alike_for_all(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, served.submit("acme") as acme, served.submit("beta") as beta:
        acme.send("generate", id="a", **BODY)
        acme.until_terminal("a")
        never, others = beta.ask("resume", id="never"), beta.ask("resume", id="a")
        assert never.pop("id") == "never"
        assert others.pop("id") == "a"
        assert never == others
        assert never["code"] == "gone"


def test_ended_requests_are_kept_up_to_a_time_and_a_size(tmp_path: Path) -> None:
    with daemon(tmp_path, retention_s=1.0, retention_bytes=30_000) as served, served.submit() as peer:
        for name in "abcd":
            peer.send("generate", id=name, **BODY)
            peer.until_terminal(name)
        assert peer.ask("resume", id="a")["code"] == "gone"
        assert peer.ask("resume", id="d", seq=60)["type"] == "accepted"
        peer.until_terminal("d")
        time.sleep(1.3)
        assert peer.ask("resume", id="d")["code"] == "gone"


def test_an_answer_larger_than_all_that_is_kept_comes_whole(tmp_path: Path) -> None:
    with daemon(tmp_path, retention_bytes=4096) as served, served.submit() as peer:
        peer.send("generate", id="a", **BODY)
        messages = peer.until_terminal("a")
    assert (tokens(messages), messages[-1]["type"]) == (EXPECTED, "done")


def test_chunks_wait_for_credit_and_come_together(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, served.submit() as peer:
        peer.send("generate", id="a", **BODY, credit=1)
        assert peer.receive()["type"] == "accepted"
        first = peer.receive()
        assert len(first["token_ids"]) == 1
        wait_until(lambda: served.metric("mlxd_requests_total", tenant="acme", outcome="length") == 1)
        peer.send("ping", id="p")
        assert peer.receive()["type"] == "pong"
        peer.send("grant", id="a", bytes=100_000)
        rest = peer.until_terminal("a")
    assert len([m for m in rest if m["type"] == "chunk" and m["token_ids"]]) == 1
    assert first["token_ids"] + tokens(rest) == EXPECTED


@pytest.mark.parametrize("window_bytes", [1, 500, 100_000])
def test_a_client_with_a_window_gets_everything_and_leaves_the_rest_with_the_daemon(
    tmp_path: Path, window_bytes: int
) -> None:
    with daemon(tmp_path) as served, served.client(window_bytes=window_bytes) as client:
        stream = client.stream("hello", SamplingParams(max_tokens=60, seed=3))
        ids = [*next(stream).token_ids]
        wait_until(lambda: served.metric("mlxd_requests_total", tenant="acme", outcome="length") == 1)
        time.sleep(0.1)
        sent = served.metric("mlxd_zmq_messages_total", direction="out", kind="chunk")
        assert (sent < 30) == (window_bytes < 1000)
        ids += [token for chunk in stream for token in chunk.token_ids]
        assert ids == EXPECTED
        assert list(client.generate("hello", SamplingParams(max_tokens=60, seed=3)).token_ids) == EXPECTED


def test_a_client_that_may_resume_reads_through_lost_connections(tmp_path: Path) -> None:
    sampling = SamplingParams(max_tokens=60, seed=3)
    with (
        daemon(tmp_path, runner=runner(SLOW_STEP_S), resume_grace_s=5.0) as served,
        Relay(tmp_path, served.config.server.submit) as relay,
        Client(relay.endpoint, token=token("acme"), timeout_s=5.0, resume_s=5.0) as client,
    ):
        stream = client.stream("hello", sampling, request_id="a")
        ids = []
        for number, chunk in enumerate(stream):
            ids += chunk.token_ids
            if number in (3, 10):
                relay.cut()
        assert ids == EXPECTED
        assert "".join(chunk.text for chunk in client.resume("a")) == TOKENIZER.decode(EXPECTED)
        with pytest.raises(RequestFailedError) as gone:
            list(client.resume("b"))
        assert gone.value.code == "gone"
        relay.cut()
        assert list(client.generate("hello", sampling).token_ids) == EXPECTED


def test_a_client_that_is_closed_resumes_nothing(tmp_path: Path) -> None:
    async def close_within() -> None:
        client = AsyncClient(served.config.server.submit, token=token("acme"), timeout_s=5.0, resume_s=5.0)
        stream = client.stream("hello", SamplingParams(max_tokens=1000))
        await anext(stream)
        await client.close()
        with pytest.raises(ConnectionLostError):
            async for _ in stream:
                pass
        with pytest.raises(ConnectionLostError):
            await client.ping()

    with daemon(tmp_path, runner=runner(SLOW_STEP_S)) as served:
        begun = time.monotonic()
        asyncio.run(close_within())
        assert time.monotonic() - begun < 3.0


def test_a_client_that_may_not_resume_says_that_the_connection_is_lost(tmp_path: Path) -> None:
    with (
        daemon(tmp_path, runner=runner(SLOW_STEP_S), resume_grace_s=5.0) as served,
        Relay(tmp_path, served.config.server.submit) as relay,
        Client(relay.endpoint, token=token("acme"), timeout_s=5.0) as client,
    ):
        stream = client.stream("hello", SamplingParams(max_tokens=60))
        next(stream)
        relay.cut()
        with pytest.raises(ConnectionLostError):
            list(stream)
