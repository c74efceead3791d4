"""A client that is closed ends all that waits on it, wherever it waits, with one error."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import zmq
import zmq.asyncio
from wire_daemon import wait_until

from mlxd.scheduler import messages as wire
from mlxd.scheduler.client import AsyncClient, Client
from mlxd.scheduler.connection import Connection
from mlxd.scheduler.errors import ConnectionLostError, RejectedError
from mlxd.scheduler.replies import reply_of
from mlxd.scheduler.request_options import new_id
from mlxd.scheduler.results import TextChunk
from mlxd.scheduler.transport import Transport, ZmqTransport

_T = TypeVar("_T")
LATER = RejectedError("queue_full", "the queue is full", retryable=True, retry_after_ms=60_000)


class Mute:
    """A transport whose daemon answers nothing but `reply`."""

    def __init__(
        self, reply: Callable[[str], wire.ServerMessage] | None = None, *, takes: bool = True
    ) -> None:
        self.reply = reply
        self.takes = takes
        self.is_closed = False
        self.num_sent = 0
        self._arrivals: asyncio.Queue[wire.ServerMessage] = asyncio.Queue()

    async def send(self, message: wire.ClientMessage) -> None:
        self.num_sent += 1
        if not self.takes:
            await asyncio.Event().wait()
        if self.reply is not None and isinstance(message, wire.Generate):
            self._arrivals.put_nowait(self.reply(message.id))

    async def receive(self) -> wire.ServerMessage:
        return await self._arrivals.get()

    async def close(self) -> None:
        self.is_closed = True


class Daemons:
    """Connects to each of `transports` in turn; then connecting takes for ever."""

    def __init__(self, *transports: Mute) -> None:
        self.left = list(transports)
        self.has_asked = threading.Event()

    async def connect(self) -> Transport:
        self.has_asked.set()
        if self.left:
            return self.left.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    def client(self) -> Client:
        return Client("mute", token="", timeout_s=60.0, retries=9, resume_s=60.0, connect=self.connect)


def lost(_: str) -> wire.Error:
    """It is nobody's own, so it ends the connection."""
    return wire.Error(code="unauthenticated", message="who are you?")


def stream(client: Client) -> list[TextChunk]:
    return list(client.stream("hi"))


VERBS: dict[str, Callable[[Client], object]] = {
    "generate": lambda client: client.generate("hi"),
    "stream": stream,
    "resume": lambda client: list(client.resume(new_id())),
    "cancel": lambda client: client.cancel("a"),
    "status": Client.status,
    "ping": Client.ping,
    "drain": Client.drain,
    "reload": Client.reload,
}
WAITS: dict[str, Callable[[], list[Mute]]] = {
    "for a connection": list,
    "to send": lambda: [Mute(takes=False)],
    "for an answer": lambda: [Mute()],
}


def begun(work: Callable[[], _T]) -> "Future[_T]":
    """`work` on a thread that may wait for ever."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@pytest.fixture(autouse=True)
def silence(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nobody is told but the callers."""
    yield
    gc.collect()
    assert not [*caplog.get_records("call"), *caplog.records]


def check_closed(*callers: "Future[object]") -> None:
    for caller in callers:
        with pytest.raises(ConnectionLostError, match="closed"):
            caller.result(timeout=5.0)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("wait", WAITS)
def test_another_thread_that_waits_is_told(verb: str, wait: str) -> None:
    transports = WAITS[wait]()
    daemons = Daemons(*transports)
    client = daemons.client()
    caller = begun(partial(VERBS[verb], client))
    assert daemons.has_asked.wait(5.0)
    wait_until(lambda: all(transport.num_sent for transport in transports))
    begun(client.close).result(timeout=5.0)
    check_closed(caller)
    assert all(transport.is_closed for transport in transports)


@pytest.mark.parametrize(
    "answer",
    [partial(reply_of, LATER), lost, lambda asked: wire.Accepted(id=asked)],
    ids=["to ask again", "to connect anew", "for the end"],
)
def test_one_that_had_an_answer_and_waits_is_told(answer: Callable[[str], wire.ServerMessage]) -> None:
    transport = Mute(answer)
    client = Daemons(transport).client()
    caller = begun(partial(client.generate, "hi"))
    wait_until(lambda: transport.num_sent)
    begun(client.close).result(timeout=5.0)
    check_closed(caller)


def test_several_that_close_at_once_all_return_and_calls_among_them_raise() -> None:
    """Whenever a call begins: none is left on a loop that has stopped."""
    for _ in range(20):
        client = Daemons(Mute()).client()
        early = [begun(partial(verb, client)) for verb in VERBS.values()]
        closers = [begun(client.close) for _ in range(4)]
        late = [begun(partial(verb, client)) for verb in VERBS.values()]
        for closer in closers:
            closer.result(timeout=5.0)
        check_closed(*early, *late)


def test_no_thread_is_left_and_a_stream_that_nobody_reads_ends_without_a_word() -> None:
    client = Daemons(Mute(lambda asked: wire.Chunk(id=asked, seq=0, text="a", token_ids=(1,)))).client()
    chunks = client.stream("hi")
    client.close()
    assert "mlxd-client" not in {thread.name for thread in threading.enumerate()}
    chunks.close()


@asynccontextmanager
async def waiting(daemons: Daemons) -> AsyncIterator[tuple[AsyncClient, "asyncio.Future[TextChunk]"]]:
    client = AsyncClient("mute", token="", timeout_s=60.0, connect=daemons.connect)
    chunks = client.stream("hi")
    reader = asyncio.ensure_future(anext(chunks))
    await asyncio.sleep(0.01)
    assert not reader.done()
    yield client, reader
    await chunks.aclose()


@pytest.mark.parametrize("wait", WAITS)
def test_a_reader_in_the_same_loop_is_told_and_is_not_cancelled(wait: str) -> None:
    async def scenario() -> None:
        async with waiting(Daemons(*WAITS[wait]())) as (client, reader):
            await asyncio.gather(client.close(), client.close())
            with pytest.raises(ConnectionLostError, match="closed"):
                await asyncio.wait_for(reader, 5.0)
            with pytest.raises(ConnectionLostError, match="closed"):
                await client.ping()

    asyncio.run(scenario())


def test_a_reader_that_is_cancelled_is_cancelled() -> None:
    async def scenario() -> None:
        async with waiting(Daemons(Mute())) as (client, reader):
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            await client.close()

    asyncio.run(scenario())


def test_whoever_sends_as_the_connection_is_lost_is_told_and_is_not_cancelled(tmp_path: Path) -> None:
    async def scenario() -> None:
        context = zmq.asyncio.Context.instance()
        with context.socket(zmq.ROUTER) as deaf:
            deaf.set(zmq.RCVHWM, 1)
            deaf.bind(f"ipc://{tmp_path}/deaf")
            dealers = [context.socket(zmq.DEALER) for _ in range(2)]
            for dealer in dealers:
                dealer.set(zmq.SNDHWM, 1)
                dealer.connect(f"ipc://{tmp_path}/deaf")
            connection = Connection(ZmqTransport(*dealers), 60.0)
            sender = asyncio.create_task(flood(connection))
            await asyncio.sleep(0.2)
        with pytest.raises(ConnectionLostError, match="the daemon closed the connection"):
            await asyncio.wait_for(sender, 5.0)

    asyncio.run(scenario())


async def flood(connection: Connection) -> None:
    """Until libzmq takes no more."""
    while True:
        await connection.send(wire.Status(id="x" * 100_000))
