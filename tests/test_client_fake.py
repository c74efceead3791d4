"""Clients over a scripted daemon: what users' own tests rely on."""

import asyncio

import pytest

from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.errors import (
    ClientTimeoutError,
    ConnectionLostError,
    EngineFailedError,
    InvalidParamError,
    InvalidPromptError,
    MlxdError,
    RejectedError,
    RequestFailedError,
)
from mlxd.scheduler.events import Usage
from mlxd.scheduler.results import Completion
from mlxd.scheduler.testing import FakeDaemon, fake_async_client, fake_client

FULL = RejectedError("queue_full", "the queue is full", retryable=True, retry_after_ms=1)


def test_whole_and_streamed_answers_carry_the_scripted_text() -> None:
    with fake_client(["two words", "two words"]) as client:
        answer = client.generate("hi", SamplingParams(max_tokens=5))
        chunks = list(client.stream("hi"))
    assert answer == Completion("two words", (0, 1), "stop", Usage(1, 2))
    assert [chunk.text for chunk in chunks] == ["two", " words", ""]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "stop"]
    assert chunks[-1].usage == Usage(1, 2)


def test_requests_reach_the_daemon_as_they_were_asked() -> None:
    daemon = FakeDaemon(["a", "b", "c"])
    with daemon.client() as client:
        client.generate("text", SamplingParams(seed=7), request_id="mine")
        client.generate(messages=[{"role": "user", "content": "hello"}])
        client.generate(token_ids=[1, 2])
    text, chat, ids = daemon.requests
    assert (text.id, text.prompt, text.sampling.seed, text.stream) == ("mine", "text", 7, False)
    assert isinstance(chat.messages, tuple)
    assert (chat.messages[0].role, chat.messages[0].content) == ("user", "hello")
    assert ids.token_ids == (1, 2)


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        InvalidParamError("top_p", 2, "a number above 0 to 1"),
        InvalidPromptError("the prompt is empty"),
        RequestFailedError("numeric", "logits are not finite"),
        EngineFailedError("step failed"),
        ConnectionLostError("gone"),
    ],
    ids=lambda error: error.code,
)
def test_scripted_errors_are_raised_as_they_are(error: MlxdError) -> None:
    with fake_client([error, "next"]) as client:
        with pytest.raises(type(error)) as raised:
            client.generate("hi")
        assert str(raised.value) == str(error)
        assert raised.value.code == error.code
        assert client.generate("hi").text == "next"


def test_rejections_say_when_to_come_back() -> None:
    with fake_client([FULL]) as client, pytest.raises(RejectedError) as raised:
        client.generate("hi")
    assert (raised.value.reason, raised.value.retryable, raised.value.retry_after_ms) == (
        "queue_full",
        True,
        1,
    )


def test_retryable_rejections_are_tried_again_as_often_as_allowed() -> None:
    daemon = FakeDaemon([FULL, FULL, "done", FULL, FULL, FULL])
    with daemon.client(retries=2) as client:
        assert client.generate("hi").text == "done"
        with pytest.raises(RejectedError):
            client.generate("hi")
    assert len(daemon.requests) == 6


def test_final_rejections_are_not_tried_again() -> None:
    daemon = FakeDaemon([RejectedError("never_fits", "too long", retryable=False), "unused"])
    with daemon.client(retries=5) as client, pytest.raises(RejectedError):
        client.generate("hi")
    assert len(daemon.requests) == 1


def test_a_silent_daemon_is_a_timeout_and_the_request_is_cancelled() -> None:
    daemon = FakeDaemon([ClientTimeoutError("silence"), "next"])
    with daemon.client(timeout_s=0.05) as client:
        with pytest.raises(ClientTimeoutError, match=r"silent for 0\.05 s"):
            client.generate("hi", request_id="slow")
        assert client.cancel("slow") is False
        assert client.generate("hi").text == "next"


def test_a_request_cancelled_by_another_call_raises() -> None:
    async def scenario() -> bool:
        async with fake_async_client([ClientTimeoutError("silence")]) as client:
            waiting = asyncio.create_task(client.generate("hi", request_id="a"))
            await asyncio.sleep(0.01)
            found = await client.cancel("a")
            with pytest.raises(RequestFailedError, match="cancelled"):
                await waiting
            return found

    assert asyncio.run(scenario()) is True


def test_one_id_cannot_be_waited_for_twice() -> None:
    async def scenario() -> None:
        async with fake_async_client([ClientTimeoutError("silence")]) as client:
            waiting = asyncio.create_task(client.generate("hi", request_id="a"))
            await asyncio.sleep(0.01)
            with pytest.raises(MlxdError) as raised:
                await client.generate("hi", request_id="a")
            assert raised.value.code == "id_conflict"
            waiting.cancel()
            await asyncio.wait([waiting])

    asyncio.run(scenario())


def test_a_closed_client_ends_what_is_open_and_says_so() -> None:
    client = fake_client(["never read"])
    chunks = client.stream("hi")
    next(chunks)
    client.close()
    client.close()
    with pytest.raises(ConnectionLostError):
        next(chunks)
    with pytest.raises(ConnectionLostError, match="closed"):
        client.generate("hi")


def test_a_conversation_without_content_is_refused_by_name() -> None:
    with fake_client([]) as client, pytest.raises(InvalidParamError, match="content"):
        client.generate(messages=[{"role": "user"}])


def test_asking_more_often_than_scripted_fails_the_test() -> None:
    with fake_client([]) as client, pytest.raises(AssertionError, match="no reply left for request 1"):
        client.generate("hi")


def test_questions_to_the_daemon_have_plain_answers() -> None:
    with fake_client([]) as client:
        assert client.ping() == "running"
        assert client.status().state == "running"
        assert client.cancel("unknown") is False
        client.drain()
