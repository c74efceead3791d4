"""Clients that read less than is made for them, on real sockets: their requests make way and come back."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import UNSET
from wire_daemon import TERMINAL, Daemon, Peer, config, daemon_of, runner, tokenizer, wait_until

from mlxd.batching.fake_runner import fake_completion
from mlxd.scheduler import messages as wire
from mlxd.scheduler.config import SchedulerConfig
from mlxd.scheduler.events import RequestKey, Usage
from mlxd.scheduler.open_streams import OpenStreams
from mlxd.scheduler.pauses import Pauses
from mlxd.scheduler.readers import Readers
from mlxd.scheduler.retention import Retention
from mlxd.scheduler.session import Session
from mlxd.scheduler.stream import Stream
from mlxd.scheduler.transcript import Transcript

TOKENIZER = tokenizer()
STEP_S = 0.001
NUM_TOKENS = 1200
SLOW: dict[str, Any] = {
    "prompt": "slow",
    "sampling": {"max_tokens": NUM_TOKENS, "seed": 1, "ignore_eos": True},
}
ALONE = fake_completion(TOKENIZER.encode("slow"), 1, NUM_TOKENS, TOKENIZER.vocab_size)
ALL = 2**30


@contextmanager
def daemon(folder: Path, **server: Any) -> Iterator[Daemon]:
    """One row, and little that may be left unread."""
    settings = config(folder, **({"max_client_buffer_bytes": 4096, "drain_timeout_s": 0.2} | server))
    scheduler = SchedulerConfig(max_rows=1, slice_tokens=None)
    with daemon_of(msgspec.structs.replace(settings, scheduler=scheduler), runner(STEP_S)) as running:
        yield running


def tokens(messages: list[dict[str, Any]]) -> list[int]:
    return [token for m in messages if m["type"] == "chunk" for token in m["token_ids"]]


def paused(served: Daemon, tenant: str = "acme") -> float:
    return served.metric("mlxd_requests_paused", tenant=tenant)


def num_ended(served: Daemon, outcome: str) -> float:
    return served.metric("mlxd_requests_total", tenant="acme", outcome=outcome)


def until_paused(served: Daemon, peer: Peer, request_id: str = "slow", **fields: Any) -> None:
    """A request with credit for ten bytes, until the daemon holds enough of it."""
    peer.send("generate", id=request_id, **SLOW, credit=10, **fields)
    wait_until(lambda: paused(served) == 1, 20.0)


@dataclass
class FakeEngine:
    """Keeps what it is told."""

    told: list[str] = field(default_factory=list)

    def pause(self, key: RequestKey) -> None:
        self.told.append("pause")

    def unpause(self, key: RequestKey) -> None:
        self.told.append("unpause")


def one_stream(num_bytes: int) -> tuple[Stream, OpenStreams]:
    stream = Stream(
        RequestKey("acme", "a"), b"", is_whole=False, transcript=Transcript("a"), is_accepted=True
    )
    stream.attach(Session(), 0, 0)
    for _ in range(num_bytes // 10):
        stream.transcript.add("x" * 5, (1,))
    streams = OpenStreams(Retention(600.0, 2**20, lambda stream: None))
    streams.add(stream)
    return stream, streams


@pytest.mark.parametrize(
    ("unread_bytes", "told"),
    [
        ((500,), []),
        ((510,), ["pause"]),
        ((510, 600, 1000), ["pause"]),
        ((510, 260), ["pause"]),
        ((510, 250), ["pause", "unpause"]),
        ((510, 250, 500), ["pause", "unpause"]),
        ((510, 0, 510), ["pause", "unpause", "pause"]),
    ],
)
def test_it_pauses_above_a_half_and_goes_on_at_a_quarter(
    unread_bytes: tuple[int, ...], told: list[str]
) -> None:
    engine, (stream, streams) = FakeEngine(), one_stream(1000)
    pauses = Pauses(engine, streams, 1000)  # type: ignore[arg-type]
    for unread in unread_bytes:
        stream.seq = (1000 - unread) // 10
        pauses.update(stream, 0.0)
    assert engine.told == told
    assert (stream.state == "paused") == (told[-1:] == ["pause"])
    assert (streams.paused.get(stream.key) is stream) == (stream.state == "paused")


def whole(stream: Stream) -> None:
    stream.is_whole = True


def not_accepted(stream: Stream) -> None:
    stream.is_accepted = False


def ending(stream: Stream) -> None:
    stream.end_as = "cancelled"


def waiting_for_the_journal(stream: Stream) -> None:
    stream.transcript.terminal = wire.Done(id="a", finish_reason="stop", usage=Usage(1, 100))


def alone(stream: Stream) -> None:
    stream.is_alone = True


@pytest.mark.parametrize(
    "change", [Stream.detach, whole, not_accepted, ending, waiting_for_the_journal, alone]
)
def test_it_is_not_paused_where_its_client_is_not_to_blame(change: Callable[[Stream], None]) -> None:
    engine, (stream, streams) = FakeEngine(), one_stream(1000)
    change(stream)
    Pauses(engine, streams, 1000).update(stream, 0.0)  # type: ignore[arg-type]
    assert engine.told == []


def test_an_ended_request_is_not_paused_and_one_that_ends_is_kept_no_more() -> None:
    engine, (stream, streams) = FakeEngine(), one_stream(1000)
    pauses = Pauses(engine, streams, 1000)  # type: ignore[arg-type]
    pauses.update(stream, 0.0)
    streams.remove(stream)
    assert len(streams.paused) == 0
    stream.seq = 100
    pauses.update(stream, 0.0)
    assert engine.told == ["pause"]


def test_a_row_that_nobody_reads_goes_to_another_tenant_and_comes_back_with_its_text(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, served.submit("acme") as slow, served.submit("beta") as other:
        slow.send("generate", id="slow", **SLOW, credit=10)
        assert slow.receive()["type"] == "accepted"
        body = {"prompt": "other", "sampling": {"max_tokens": 600, "seed": 2, "ignore_eos": True}}
        other.send("generate", id="other", **body)
        assert other.until_terminal("other")[-1]["type"] == "done"
        assert paused(served) == 1
        assert served.metric("mlxd_requests_running", tenant="acme") == 0
        assert served.metric("mlxd_kv_bytes", state="reserved") == 0
        assert served.metric("mlxd_preemptions_total", reason="credit") == 1
        with served.control("acme") as control:
            status = control.ask("status", id="s")
            assert (status["paused"], status["tenants"]["acme"]["paused"]) == (1, 1)
        wait_until(lambda: slow.receive_any().get("state") == "paused")
        slow.send("grant", id="slow", bytes=ALL)
        assert slow.until_terminal("slow")[-1]["type"] == "done"
        slow.send("resume", id="slow")
        assert tokens(slow.until_terminal("slow")) == ALONE
        assert paused(served) == 0


def test_a_little_credit_at_a_time_gives_all_of_the_text(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, served.submit() as slow:
        until_paused(served, slow)
        num_pauses = 0
        while not num_ended(served, "length"):
            num_pauses += 1
            slow.send("grant", id="slow", bytes=2500)
            wait_until(lambda: paused(served) == 0)
            wait_until(lambda: paused(served) == 1 or num_ended(served, "length"))
        slow.send("grant", id="slow", bytes=ALL)
        assert tokens(slow.until_terminal("slow")) == ALONE
        assert num_pauses > 2


def test_a_paused_request_ends_alone_when_its_time_is_over(tmp_path: Path) -> None:
    with daemon(tmp_path, retention_s=1.0) as served, served.submit() as slow:
        until_paused(served, slow)
        begun = time.monotonic()
        slow.send("generate", id="other", **SLOW)
        ends = {message["id"]: message for message in ended(slow, 2)}
        assert ends["slow"]["code"] == "slow_client"
        assert 0.5 < time.monotonic() - begun < 15.0
        assert ends["other"]["type"] == "done"
        assert num_ended(served, "slow_client") == 1
        assert paused(served) == 0


def ended(peer: Peer, count: int) -> list[dict[str, Any]]:
    """The next terminal messages."""
    messages: list[dict[str, Any]] = []
    while len(messages) < count:
        message = peer.receive()
        if message["type"] in TERMINAL:
            messages.append(message)
    return messages


def test_the_oldest_of_too_many_paused_bytes_ends_first(tmp_path: Path) -> None:
    """A tenant holds two paused requests of some 50 kB each; another one's smaller share is safe."""
    with (
        daemon(tmp_path, retention_bytes=100_000) as served,
        served.submit() as slow,
        served.submit("beta") as other,
    ):
        until_paused(served, slow, "0")
        other.send("generate", id="small", **SLOW, credit=10)
        wait_until(lambda: paused(served, "beta") == 1, 20.0)
        slow.send("generate", id="1", **SLOW, credit=10)
        [end] = ended(slow, 1)
        assert (end["id"], end["code"]) == ("0", "slow_client")
        wait_until(lambda: paused(served) == 1, 20.0)
        assert paused(served, "beta") == 1


@pytest.mark.parametrize(
    ("act", "outcome"),
    [
        (lambda served, peer: peer.send("cancel", id="slow"), "cancelled"),
        (lambda served, peer: None, "expired"),
        (lambda served, peer: served.server.request_drain(), "draining"),
        (lambda served, peer: peer.__exit__(), "client_gone"),
    ],
)
def test_whatever_ends_a_request_ends_a_paused_one(
    tmp_path: Path, act: Callable[[Daemon, Peer], None], outcome: str
) -> None:
    deadline = {"deadline_ms": 1500} if outcome == "expired" else {}
    with daemon(tmp_path) as served, served.submit() as slow:
        until_paused(served, slow, **deadline)
        act(served, slow)
        wait_until(lambda: num_ended(served, outcome) == 1)
        if outcome != "client_gone":
            [end] = [m for m in slow.until_terminal("slow") if m["type"] in TERMINAL]
            assert end.get("code", end["type"]) == outcome
    assert served.exit_code == 0


def test_another_connection_that_takes_it_over_wakes_it(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, served.submit() as slow, served.submit() as second:
        until_paused(served, slow)
        second.send("resume", id="slow")
        assert tokens(second.until_terminal("slow")) == ALONE
        assert slow.until_terminal("slow")[-1]["code"] == "taken_over"


def test_a_request_whose_reader_left_goes_on_without_it(tmp_path: Path) -> None:
    with daemon(tmp_path, resume_grace_s=30.0) as served:
        with served.submit() as slow:
            until_paused(served, slow)
        wait_until(lambda: num_ended(served, "length") == 1)
        with served.submit() as again:
            again.send("resume", id="slow")
            assert tokens(again.until_terminal("slow")) == ALONE


def test_paused_requests_keep_no_thread_awake_and_the_daemon_well(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, served.submit() as slow:
        until_paused(served, slow)
        steps = served.engine.snapshot.steps
        turns, take = [], served.engine._inbox.take

        def counted(timeout_s: float | None) -> Any:
            turns.append(timeout_s)
            return take(timeout_s)

        served.engine._inbox.take = counted  # type: ignore[method-assign]
        time.sleep(1.2)
        assert len(turns) <= 4
        assert served.engine.snapshot.steps == steps
        with served.control() as control:
            assert control.ask("ping", id="p")["state"] == "running"
        slow.send("grant", id="slow", bytes=ALL)
        assert slow.until_terminal("slow")[-1]["type"] == "done"


def test_a_connection_that_is_not_read_pauses_what_it_asked_for(tmp_path: Path) -> None:
    """Without any credit given: it is the connection that takes no more."""
    body = {**SLOW, "sampling": {**SLOW["sampling"], "top_logprobs": 20}}
    with daemon(tmp_path) as served, served.submit(rcvhwm=1) as slow, served.submit("beta") as other:
        slow.send("generate", id="slow", **body)
        wait_until(lambda: paused(served) == 1, 20.0)
        other.send("generate", id="other", **body)
        assert other.until_terminal("other", 20.0)[-1]["type"] == "done"
        held = served.metric("mlxd_client_buffer_bytes")
        assert 0 < held <= 4096
        time.sleep(0.3)
        assert served.metric("mlxd_client_buffer_bytes") == held, "no sign of life is put behind it"
        messages = slow.until_terminal("slow", 20.0)
        assert messages[-1]["type"] == "done"
        assert tokens(messages) == ALONE


def test_no_chunk_takes_more_than_a_quarter_of_what_a_connection_may_leave_unread() -> None:
    """However much there is to tell: one that finds no room is no reason to end the connection's requests."""
    stream, streams = one_stream(100_000)
    sent: list[wire.ServerMessage] = []

    def send(session: Session, message: wire.ServerMessage) -> int:
        sent.append(message)
        return 0

    async def tell() -> None:
        pauses = Pauses(FakeEngine(), streams, 4096)  # type: ignore[arg-type]
        Readers(send, streams, pauses, 4096).attach(stream, Session(), 0, UNSET)

    asyncio.run(tell())
    lengths = [10 * len(message.token_ids) for message in sent if isinstance(message, wire.Chunk)]
    assert sum(lengths) == 100_000
    assert 900 < max(lengths) <= 1024
