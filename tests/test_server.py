"""The daemon end to end over real sockets: streams, drains, failures."""

import asyncio
import random
import re
import socket
import urllib.request
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from wire_daemon import TERMINAL, daemon, free_port, runner, token, tokenizer, wait_until

from mlxd.batching.fake_runner import fake_completion
from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.async_client import AsyncClient
from mlxd.scheduler.client import Client
from mlxd.scheduler.errors import (
    ConfigError,
    ConnectionLostError,
    InvalidParamError,
    ProtocolError,
    UnauthenticatedError,
)

TOKENIZER = tokenizer()


def expected_ids(prompt: str, seed: int, count: int) -> list[int]:
    return fake_completion(TOKENIZER.encode(prompt), seed, count, TOKENIZER.vocab_size)


def test_streamed_and_whole_answers_are_the_engines_tokens_as_text(tmp_path: Path) -> None:
    sampling = SamplingParams(max_tokens=60, seed=3)
    expected = expected_ids("hello", 3, 60)
    with daemon(tmp_path) as served, served.client() as client:
        whole = client.generate("hello", sampling)
        chunks = list(client.stream("hello", sampling))
        from_ids = client.generate(token_ids=TOKENIZER.encode("hello"), sampling=sampling)
    assert list(whole.token_ids) == expected
    assert whole.text == TOKENIZER.decode(expected)
    assert (whole.finish_reason, whole.usage.completion_tokens) == ("length", 60)
    assert whole.usage.prompt_tokens == len(TOKENIZER.encode("hello"))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == expected
    assert (chunks[-1].finish_reason, chunks[-1].usage) == ("length", whole.usage)
    assert from_ids == whole


def test_log_probabilities_come_with_their_tokens(tmp_path: Path) -> None:
    sampling = SamplingParams(max_tokens=4, top_logprobs=2)
    with daemon(tmp_path) as served, served.client() as client:
        whole = client.generate("hello", sampling)
        chunks = list(client.stream("hello", sampling))
    assert [len(entry.top) for entry in whole.logprobs] == [2] * 4
    assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_text_and_engine_with_one_terminal(tmp_path: Path, stream: bool) -> None:
    expected = expected_ids("hello", 3, 60)
    text = TOKENIZER.decode(expected)
    stop = next(
        text[i : i + 3]
        for i in range(20, 60)
        if text.index(text[i : i + 3]) == i and text[i : i + 3].isascii()
    )
    sampling = {"max_tokens": 3000, "seed": 3, "stop": [stop]}
    with daemon(tmp_path, runner=runner(0.001)) as served, served.submit() as peer:
        peer.send("generate", id="a", prompt="hello", stream=stream, sampling=sampling)
        messages = peer.until_terminal("a")
        wait_until(lambda: served.metric("mlxd_requests_total", tenant="acme", outcome="stop") == 1)
        assert peer.ask("ping", id="p")["type"] == "pong"
    done = messages[-1]
    ids = [token for m in messages for token in m.get("token_ids", ())]
    assert (done["type"], done["finish_reason"]) == ("done", "stop")
    assert "".join(m.get("text", "") for m in messages) == text[: text.index(stop)]
    assert done["usage"]["completion_tokens"] == len(ids)
    assert ids == expected[: len(ids)]


def test_the_end_at_a_stop_string_tells_how_much_of_the_prompt_was_cached(tmp_path: Path) -> None:
    prompt = "hello " * 20
    with daemon(tmp_path) as served, served.client() as client:
        whole = client.generate(prompt, SamplingParams(max_tokens=40, seed=3))
        stop = next(letter for letter in whole.text if letter.isascii())
        cut = client.generate(prompt, SamplingParams(max_tokens=40, seed=3, stop=(stop,)))
    assert cut.finish_reason == "stop"
    assert cut.usage.prompt_tokens == whole.usage.prompt_tokens
    assert cut.usage.cached_tokens > 0


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_token_that_ends_it_is_in_the_ids_and_not_in_the_text(tmp_path: Path, ignore_eos: bool) -> None:
    expected = expected_ids("hello", 3, 40)
    ending = expected[20]
    first = expected.index(ending) + 1
    with (
        daemon(tmp_path, runner=runner(eos_token_ids=frozenset({ending}))) as served,
        served.client() as client,
    ):
        sampling = SamplingParams(max_tokens=40, seed=3, ignore_eos=ignore_eos)
        answer = client.generate("hello", sampling)
        stopped = client.generate(
            "hello", SamplingParams(max_tokens=40, seed=3, ignore_eos=True, stop_token_ids=(ending,))
        )
    assert list(stopped.token_ids) == expected[:first]
    assert stopped.text == TOKENIZER.decode(expected[: first - 1])
    assert stopped.finish_reason == "stop"
    assert list(answer.token_ids) == (expected if ignore_eos else expected[:first])
    assert answer.finish_reason == ("length" if ignore_eos else "stop")


def test_every_accepted_request_gets_exactly_one_terminal(tmp_path: Path) -> None:
    rng = random.Random(4)
    with (
        daemon(tmp_path, runner=runner(0.001)) as served,
        served.submit() as peer,
        served.control() as control,
    ):
        for number in range(60):
            sampling: dict[str, Any] = {"max_tokens": rng.randint(1, 40), "stop": rng.sample("aeiou", 2)}
            stream = rng.random() < 0.7
            peer.send("generate", id=f"r{number}", prompt="hi", stream=stream, sampling=sampling)
            if rng.random() < 0.4:
                control.send("cancel", id=f"r{rng.randint(0, number)}")
        messages = [peer.receive()]
        while sum(m["type"] in TERMINAL for m in messages) < 60:
            messages.append(peer.receive())
        assert peer.ask("ping", id="p")["type"] == "pong"
        wait_until(lambda: served.engine.snapshot.running == 0)
    assert len({m["id"] for m in messages if m["type"] in TERMINAL}) == 60
    by_id: dict[str, list[dict[str, Any]]] = {}
    for message in messages:
        by_id.setdefault(message["id"], []).append(message)
    for own in by_id.values():
        assert own[0]["type"] == "accepted"
        chunks = [m for m in own if m["type"] == "chunk"]
        assert len(chunks) == len(own) - 2
        sizes = [max(1, len(m["token_ids"])) for m in chunks]
        assert [m["seq"] for m in chunks] == [0, *accumulate(sizes)][: len(chunks)]
    assert Counter(m["type"] for m in messages)["cancelled"] > 0


def test_many_requests_share_one_connection(tmp_path: Path) -> None:
    async def scenario(endpoint: str) -> list[tuple[int, ...]]:
        async with AsyncClient(endpoint, token=token("acme")) as client:
            answers = await asyncio.gather(
                *(client.generate(f"p{n}", SamplingParams(max_tokens=20, seed=n)) for n in range(24))
            )
        return [answer.token_ids for answer in answers]

    with daemon(tmp_path) as served:
        answers = asyncio.run(scenario(served.config.server.submit))
    assert answers == [tuple(expected_ids(f"p{n}", n, 20)) for n in range(24)]


def test_leaving_a_stream_early_cancels_it(tmp_path: Path) -> None:
    with daemon(tmp_path, runner=runner(0.005)) as served, served.client() as client:
        for chunk in client.stream("hi", SamplingParams(max_tokens=2000)):
            assert chunk.finish_reason is None
            break
        wait_until(lambda: served.metric("mlxd_requests_total", tenant="acme", outcome="cancelled") == 1)
        assert client.generate("hi", SamplingParams(max_tokens=2)).usage.completion_tokens == 2


def test_closing_a_client_ends_its_requests(tmp_path: Path) -> None:
    with daemon(tmp_path, runner=runner(0.005)) as served:
        client = served.client()
        chunks = client.stream("hi", SamplingParams(max_tokens=2000))
        next(chunks)
        client.close()
        with pytest.raises(ConnectionLostError):
            next(chunks)
        wait_until(lambda: served.metric("mlxd_requests_total", tenant="acme", outcome="client_gone") == 1)


def test_a_wrong_token_is_an_error_of_its_own(tmp_path: Path) -> None:
    with (
        daemon(tmp_path) as served,
        Client(served.config.server.submit, token="wrong", timeout_s=5) as client,
        pytest.raises(UnauthenticatedError),
    ):
        client.ping()


def test_sampling_out_of_range_is_told_without_a_daemon(tmp_path: Path) -> None:
    with (
        Client(f"ipc://{tmp_path}/nobody", token="t") as client,
        pytest.raises(InvalidParamError, match=r"sampling\.temperature is -1; it must be a number from 0"),
    ):
        client.generate("hi", SamplingParams(temperature=-1))


def test_an_endpoint_that_is_none_is_named() -> None:
    with Client("nonsense", token="t") as client, pytest.raises(ConfigError, match="'nonsense'"):
        client.ping()


def test_loopback_tcp_serves_the_same(tmp_path: Path) -> None:
    addresses = {name: f"tcp://127.0.0.1:{free_port()}" for name in ("submit", "control")}
    with daemon(tmp_path, **addresses) as served, served.client() as client:
        assert client.generate("hi", SamplingParams(max_tokens=3)).usage.completion_tokens == 3
        assert client.ping() == "running"


def test_the_log_says_what_is_served_and_how_it_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="mlxd"), daemon(tmp_path) as served:
        server = served.config.server
    told = [record.getMessage() for record in caplog.records if record.module == "server"]
    ready = f"ready model=fake device=none tenants=3 submit={server.submit} control={server.control} metrics="
    assert re.fullmatch(re.escape(ready) + r"http://127\.0\.0\.1:[1-9]\d*/metrics", told[0])
    assert (told[1].split()[0], told[2:]) == ("draining", ["ended exit_code=0"])


def test_metrics_and_health_are_served_beside(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with daemon(tmp_path, metrics=address) as served, served.client() as client:
        client.generate("hi", SamplingParams(max_tokens=3))
        wait_until(lambda: served.engine.snapshot.running == 0)
        with urllib.request.urlopen(f"http://{address}/metrics") as response:
            text = response.read().decode()
        with urllib.request.urlopen(f"http://{address}/healthz") as response:
            assert response.status == 200
    assert 'mlxd_requests_total{outcome="length",tenant="acme"} 1.0' in text
    assert 'mlxd_zmq_messages_total{direction="in",kind="generate"} 1.0' in text


def test_long_prompts_are_tokenised_too(tmp_path: Path) -> None:
    prompt = "the quick brown fox " * 400
    with daemon(tmp_path, runner=runner(max_model_len=16384)) as served, served.client() as client:
        answer = client.generate(prompt, SamplingParams(max_tokens=2, seed=1))
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode(prompt))


def test_a_daemon_that_turns_clients_away_says_why(tmp_path: Path) -> None:
    with daemon(tmp_path, max_clients=1) as served, served.submit(), served.client() as client:
        with pytest.raises(ProtocolError) as raised:
            client.ping()
        assert raised.value.code == "too_many_clients"
