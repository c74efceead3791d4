"""An error about a message is told apart from the end of the request whose id that message names."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from wire_daemon import TERMINAL, Daemon, daemon, runner

from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler import messages as wire
from mlxd.scheduler.async_client import AsyncClient
from mlxd.scheduler.connection import Connection
from mlxd.scheduler.errors import InvalidParamError, MlxdError, ProtocolError, RequestFailedError
from mlxd.scheduler.events import Usage
from mlxd.scheduler.login import Login
from mlxd.scheduler.protocol import encode
from mlxd.scheduler.transport import Transport, ZmqTransport

NUM_TOKENS = 24
SAMPLING = {"max_tokens": NUM_TOKENS, "seed": 1, "ignore_eos": True}
OPEN = {"type": "generate", "prompt": "hi", "sampling": SAMPLING}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(tmp_path_factory.mktemp("d"), runner=runner(0.005)) as running:
        yield running


@pytest.fixture
def request_id(request: pytest.FixtureRequest) -> str:
    """One that no other test has."""
    return str(request.node.name)[:128]


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "grant of nothing": ({"type": "grant", "bytes": 0}, "invalid_param", "grant"),
    "grant without bytes": ({"type": "grant"}, "invalid_param", "grant"),
    "resume before the start": ({"type": "resume", "seq": -1}, "invalid_param", "resume"),
    "resume with an unknown field": ({"type": "resume", "from": 1}, "invalid_param", "resume"),
    "cancel with an unknown field": ({"type": "cancel", "why": "?"}, "invalid_param", "cancel"),
    "generate with an unknown field": (OPEN | {"temprature": 1}, "invalid_param", "generate"),
    "generate out of range": (OPEN | {"sampling": {"top_p": 2}}, "invalid_param", "generate"),
    "generate without a prompt": ({"type": "generate"}, "invalid_param", "generate"),
    "generate with two prompts": (OPEN | {"token_ids": [1]}, "invalid_param", "generate"),
    "another version": ({"type": "grant", "bytes": 1, "v": 9}, "unsupported", "grant"),
    "an unknown type": ({"type": "grand", "bytes": 1}, "unsupported", "unknown"),
    "a type that is no text": ({"type": [], "bytes": 1}, "unsupported", "unknown"),
    "no type": ({"bytes": 1}, "unsupported", "unknown"),
    "drain by a tenant": ({"type": "drain"}, "forbidden", "drain"),
    "reload by a tenant": ({"type": "reload"}, "forbidden", "reload"),
}


@pytest.mark.parametrize(("message", "code", "about"), WRONG.values(), ids=WRONG)
def test_the_open_request_goes_on_after_an_error_about_another_message(
    served: Daemon, message: dict[str, Any], code: str, about: str, request_id: str
) -> None:
    with served.submit() as peer:
        peer.send(**OPEN, id=request_id)
        assert [peer.receive()["type"] for _ in range(2)] == ["accepted", "chunk"]
        peer.raw(msgspec.msgpack.encode({"id": request_id} | message))
        received = [peer.receive()]
        while received[-1]["type"] not in TERMINAL or "about" in received[-1]:
            received.append(peer.receive())
    (error,) = (each for each in received if each["type"] == "error")
    assert (error["id"], error["code"], error["about"]) == (request_id, code, about)
    assert received[-1]["type"] == "done"
    assert received[-1]["usage"]["completion_tokens"] == NUM_TOKENS


def test_another_body_under_an_open_id_is_rejected_and_the_open_request_goes_on(
    served: Daemon, request_id: str
) -> None:
    with served.submit() as peer:
        peer.send(**OPEN, id=request_id)
        assert peer.receive()["type"] == "accepted"
        peer.send(**OPEN | {"prompt": "another", "id": request_id})
        while (message := peer.receive())["type"] == "chunk":
            pass
        assert (message["type"], message["reason"]) == ("rejected", "id_conflict")
        assert peer.until_terminal(request_id)[-1]["type"] == "done"


@pytest.mark.parametrize(
    ("message", "code"),
    [(OPEN | {"top": 1}, "invalid_param"), ({"type": "resume"}, "gone")],
    ids=["generate", "resume"],
)
def test_what_was_never_begun_ends_with_the_error_about_its_own_message(
    served: Daemon, message: dict[str, Any], code: str, request_id: str
) -> None:
    with served.submit() as peer:
        error = peer.ask(**message, id=request_id)
        assert (error["code"], error["about"]) == (code, message["type"])
        assert peer.ask("ping", id="p")["type"] == "pong", "there was a second answer"


def test_a_request_that_is_refused_once_its_prompt_was_looked_at_ends(
    served: Daemon, request_id: str
) -> None:
    with served.submit() as peer:
        end = peer.ask("generate", id=request_id, prompt="")
    assert end == {
        "type": "error",
        "v": 1,
        "id": request_id,
        "code": "invalid_prompt",
        "message": end["message"],
    }


def test_the_end_of_a_request_is_about_no_message(tmp_path: Path) -> None:
    with daemon(tmp_path, runner=runner(fail_at_step=3)) as served, served.submit() as peer:
        peer.send(**OPEN, id="r")
        end = peer.until_terminal("r")[-1]
    assert (end["type"], end["code"]) == ("error", "engine_failed")
    assert "about" not in end


class Recorded(ZmqTransport):
    """Keeps itself, so that a test can send what no client would."""

    made: "Recorded"

    def send_raw(self, **fields: Any) -> None:
        Recorded.made._submit.send(msgspec.msgpack.encode(fields))


async def connect(served: Daemon) -> Transport:
    transport = await Recorded.connect(served.config.server.submit, Login("acme-token"), timeout_s=5.0)
    assert isinstance(transport, Recorded)
    Recorded.made = transport
    return transport


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "grant", "bytes": 0},
        {"type": "resume", "seq": -1},
        {"type": "cancel", "why": "?"},
        OPEN | {"temprature": 1},
        OPEN | {"prompt": "another"},
        {"type": "unknown"},
    ],
    ids=lambda message: message["type"],
)
def test_clients_read_on_after_an_error_about_another_message(
    served: Daemon, wrong: dict[str, Any], request_id: str
) -> None:
    async def main() -> list[int]:
        tokens: list[int] = []
        async with AsyncClient("", token="", connect=lambda: connect(served)) as client:
            async for chunk in client.stream("hi", SamplingParams(**SAMPLING), request_id=request_id):
                if not tokens:
                    Recorded.made.send_raw(**wrong, id=request_id)
                tokens += chunk.token_ids
            assert await client.ping() == "running"
        return tokens

    assert len(asyncio.run(main())) == NUM_TOKENS


def test_the_blocking_client_reads_on_too(served: Daemon, request_id: str) -> None:
    with served.client() as client:
        client._client._connect = lambda: connect(served)
        chunks = client.stream("hi", SamplingParams(**SAMPLING), request_id=request_id)
        first = next(chunks)
        wrong = {"type": "grant", "id": request_id, "bytes": 0}
        client._loop.call_soon_threadsafe(lambda: Recorded.made.send_raw(**wrong))
        assert len(first.token_ids) + sum(len(chunk.token_ids) for chunk in chunks) == NUM_TOKENS


class Scripted:
    """A transport that gives these messages."""

    def __init__(self, *messages: wire.ServerMessage) -> None:
        self._messages: asyncio.Queue[wire.ServerMessage] = asyncio.Queue()
        for message in messages:
            self._messages.put_nowait(message)

    async def send(self, message: wire.ClientMessage) -> None:
        encode(message)

    async def receive(self) -> wire.ServerMessage:
        return await self._messages.get()

    async def close(self) -> None:
        pass


def error(code: str = "x", **fields: Any) -> wire.Error:
    return wire.Error(id="r", code=code, message="m", **fields)


CONFLICT = wire.Rejected(id="r", reason="id_conflict", message="m", retryable=False)


@pytest.mark.parametrize(
    ("asked", "arrivals", "raised"),
    [
        ("generate", [error(about="generate")], RequestFailedError),
        ("generate", [error("flood", about="grant"), error(about="unknown")], RequestFailedError),
        ("generate", [error("flood", about="grant"), error()], RequestFailedError),
        ("generate", [CONFLICT], MlxdError),
        ("", [error("flood", about="generate"), CONFLICT, error()], RequestFailedError),
        ("", [error("flood", about="unknown"), error()], RequestFailedError),
    ],
    ids=["its own", "unknown", "older daemon", "rejected", "open", "open, unknown"],
)
def test_a_waiter_takes_what_is_about_its_message(
    asked: str, arrivals: list[wire.ServerMessage], raised: type[MlxdError]
) -> None:
    async def main() -> None:
        connection = Connection(Scripted(*arrivals), 5.0)
        with connection.mailbox("r", asked) as mailbox, pytest.raises(raised) as caught:
            await mailbox.next()
        assert caught.value.code != "flood"
        await connection.close()

    asyncio.run(main())


@pytest.mark.parametrize("wrong", ["", "x" * 129], ids=["empty", "long"])
def test_an_id_that_could_not_be_answered_is_refused_by_the_client(
    served: Daemon, wrong: str, request_id: str
) -> None:
    with served.client() as client:
        stream = client.stream("hi", SamplingParams(**SAMPLING), request_id=request_id)
        next(stream)
        for ask in (
            lambda: client.cancel(wrong),
            lambda: next(client.resume(wrong)),
            lambda: client.generate("hi", request_id=wrong),
            lambda: next(client.stream("hi", request_id=wrong)),
        ):
            with pytest.raises(InvalidParamError, match=r"id is '.*'; it must be 1 to 128 characters"):
                ask()
        assert [chunk.finish_reason for chunk in stream][-1] == "length"


@pytest.mark.parametrize(
    "asked",
    [{"prompt": "\udcff"}, {"token_ids": [2**70]}, {"messages": [{"role": "user", "content": "\ud800"}]}],
    ids=["prompt", "token_ids", "messages"],
)
def test_what_no_frame_can_hold_is_one_error_and_the_connection_stays(
    served: Daemon, asked: dict[str, Any]
) -> None:
    with served.client() as client:
        assert client.ping() == "running"
        with pytest.raises(InvalidParamError, match="the message cannot be sent: "):
            client.generate(**asked)
        assert client.ping() == "running"


def test_an_error_about_a_cancel_is_told_to_who_cancels_and_not_to_the_request() -> None:
    async def main() -> None:
        done = wire.Done(id="r", finish_reason="stop", usage=Usage(1, 1))
        connection = Connection(Scripted(error("busy", about="cancel"), done), 5.0)
        with connection.mailbox("r", "") as request, connection.mailbox("cancel r", "cancel") as cancel:
            with pytest.raises(ProtocolError):
                await cancel.next()
            assert await request.next() == done
        await connection.close()

    asyncio.run(main())


def test_an_address_is_one_waiters() -> None:
    async def main() -> None:
        connection = Connection(Scripted(), 1.0)
        with (
            connection.mailbox("r", "generate"),
            pytest.raises(ProtocolError, match="'r' is waited for already"),
            connection.mailbox("r", "resume"),
        ):
            pass
        await connection.close()

    asyncio.run(main())
