"""Durable requests: what was accepted is answered, whatever happens to the process in between."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fault_process import NUM_TOKENS, Collector, body, durable_config, expected, fault_process, tokens
from msgspec.structs import replace
from wire_daemon import TERMINAL, Peer, daemon_of, runner, wait_until

from mlxd.scheduler import journal, server
from mlxd.scheduler.errors import JournalError
from mlxd.scheduler.journal_entries import Change, End
from mlxd.scheduler.journal_file import JournalFile


def open_entries(path: Path) -> list[tuple[str, bool]]:
    """Id and whether it has ended, of what a closed journal holds."""
    file = JournalFile(str(path), fsync=False, max_bytes=2**30)
    try:
        return [(entry.key.request_id, entry.record is not None) for entry in file.load()]
    finally:
        file.close()


def test_a_killed_daemon_runs_again_what_it_accepted_and_tells_what_had_ended(tmp_path: Path) -> None:
    config = durable_config(tmp_path)
    with fault_process(tmp_path, config) as first, first.peer() as peer:
        peer.send("generate", id="ended", **body(1))
        ended = peer.until_terminal("ended")
        for seed in (2, 3):
            peer.send("generate", id=f"open {seed}", **body(seed), stream=seed == 2)
        head = [message for message in (peer.receive() for _ in range(8)) if message["id"] == "open 2"]
        first.kill()
    got = len(tokens(head))
    assert 0 < got < NUM_TOKENS
    with fault_process(tmp_path, config) as second, second.peer() as peer:
        peer.send("resume", id="ended", seq=0)
        again = peer.until_terminal("ended")
        assert (tokens(again), again[-1]) == (tokens(ended), ended[-1])
        peer.send("resume", id="open 2", seq=got)
        assert tokens(head) + tokens(peer.until_terminal("open 2")) == expected(2)
        peer.send("generate", id="open 3", **body(3), stream=False)
        assert tokens(peer.until_terminal("open 3")) == expected(3)
        peer.send("generate", id="open 3", **body(4))
        assert peer.until_terminal("open 3")[-1]["reason"] == "id_conflict"
        second.process.terminate()
        assert second.process.wait(10) == 0
    assert open_entries(tmp_path / "journal") == [("ended", True), ("open 2", True), ("open 3", True)]


def test_a_request_without_a_seed_keeps_the_one_that_it_was_given(tmp_path: Path) -> None:
    config = durable_config(tmp_path)
    unseeded = {"prompt": "hello", "sampling": {"max_tokens": 100}}
    with fault_process(tmp_path, config) as first, first.peer() as peer:
        peer.send("generate", id="a", **unseeded)
        head = [peer.receive() for _ in range(9)]
        first.kill()
    with fault_process(tmp_path, config) as second, second.peer() as peer:
        peer.send("generate", id="a", **unseeded)
        assert tokens(peer.until_terminal("a"))[: len(tokens(head))] == tokens(head)


def test_a_request_that_was_begun_in_three_processes_that_were_killed_is_given_up(tmp_path: Path) -> None:
    config = durable_config(tmp_path)
    for start in range(3):
        with fault_process(tmp_path, config) as daemon, daemon.peer() as peer:
            message = "resume" if start else "generate"
            peer.send(message, id="poison", **({} if start else body(1)))
            assert [peer.receive()["type"] for _ in range(2)] == ["accepted", "chunk"]
            daemon.kill()
    with fault_process(tmp_path, config) as daemon, daemon.peer() as peer:
        peer.send("resume", id="poison")
        end = peer.until_terminal("poison")[-1]
    assert (end["code"], end["message"]) == (
        "engine_failed",
        "the daemon ended 3 times with this request begun, the last time with no other",
    )


def until_all_got(peer: Peer, kind: str, names: set[str]) -> None:
    got: set[str] = set()
    while got != names:
        message = peer.receive()
        got |= {message["id"]} if message["type"] == kind else set()


def test_new_requests_wait_while_one_runs_alone_and_may_be_cancelled(tmp_path: Path) -> None:
    config = durable_config(tmp_path)
    with fault_process(tmp_path, config) as first, first.peer() as peer:
        for seed in (1, 2):
            peer.send("generate", id=f"suspect {seed}", **body(seed, 200))
        until_all_got(peer, "accepted", {"suspect 1", "suspect 2"})
        first.kill()
    with fault_process(tmp_path, config) as second, second.peer() as peer:
        for seed in (1, 2):
            peer.send("resume", id=f"suspect {seed}")
        until_all_got(peer, "chunk", {"suspect 1", "suspect 2"})
        second.kill()
    with fault_process(tmp_path, config) as third, third.peer() as peer:
        for name in ("waits", "cancelled"):
            peer.send("generate", id=name, **body(3, 5))
        for seed in (1, 2):
            peer.send("resume", id=f"suspect {seed}")
        for name in ("cancelled", "suspect 2"):
            peer.send("cancel", id=name)
        told: list[dict[str, Any]] = []
        while not told or (told[-1]["id"], told[-1]["type"]) != ("waits", "done"):
            told.append(peer.receive())
    assert tokens([message for message in told if message["id"] == "waits"]) == expected(3, 5)
    ends = [(message["id"], message["type"]) for message in told if message["type"] in TERMINAL]
    assert set(ends[:2]) == {("cancelled", "cancelled"), ("suspect 2", "cancelled")}
    assert ends[2:] == [("suspect 1", "done"), ("waits", "done")]


def test_a_request_goes_on_without_its_client_and_a_cancelled_one_does_not_come_back(tmp_path: Path) -> None:
    with daemon_of(durable_config(tmp_path), runner(0.005)) as served:
        with served.submit() as peer:
            for name in ("left", "cancelled"):
                peer.send("generate", id=name, **body(1))
                assert peer.receive()["type"] in ("accepted", "chunk")
            peer.send("cancel", id="cancelled")
            peer.until_terminal("cancelled")
        wait_until(lambda: served.metric("mlxd_requests_total", tenant="acme", outcome="length") == 1)
        with served.submit() as peer:
            peer.send("resume", id="left")
            assert tokens(peer.until_terminal("left")) == expected(1)
            peer.send("resume", id="cancelled", seq=1000)
            assert peer.until_terminal("cancelled")[-1]["type"] == "cancelled"


def test_a_full_journal_rejects_and_what_runs_goes_on(tmp_path: Path) -> None:
    config = durable_config(tmp_path, max_bytes="1MiB")
    stop = [chr(0x1F600 + number) * 256 for number in range(16)]
    with daemon_of(config, runner(0.005)) as served, served.submit() as peer:
        for seed in range(100):
            sampling = {"max_tokens": 100, "seed": seed, "stop": stop}
            peer.send("generate", id=str(seed), prompt="hi", sampling=sampling)
        ends = {}
        while len(ends) < 100:
            if (message := peer.receive())["type"] in TERMINAL:
                ends[message["id"]] = message
        full = [end for end in ends.values() if end["type"] == "rejected"]
        assert 0 < len(full) < 80
        assert {(end["reason"], end["retryable"], end["retry_after_ms"] > 0) for end in full} == {
            ("journal_full", True, True)
        }
        assert {end["type"] for end in ends.values()} == {"done", "rejected"}
        assert served.metric("mlxd_journal_changes_total", result="failed") >= len(full)
        wait_until(lambda: served.metric("mlxd_requests_running", tenant="acme") == 0)
        peer.send("generate", id="later", **body(1))
        assert peer.until_terminal("later")[-1]["type"] == "done"
    assert served.exit_code == 0


def is_end(changes: Sequence[Change]) -> bool:
    return any(isinstance(change, End) for change in changes)


@pytest.fixture
def ends_may_be_written(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No end is written before it is set."""
    is_free, write = threading.Event(), JournalFile.write

    def write_when_free(file: JournalFile, changes: Sequence[Change]) -> list[JournalError | None]:
        if is_end(changes):
            is_free.wait()
        return write(file, changes)

    monkeypatch.setattr(JournalFile, "write", write_when_free)
    yield is_free
    is_free.set()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", ["done", "cancelled", "error"])
def test_an_end_leaves_once_the_journal_has_it_and_chunks_before(
    tmp_path: Path, ends_may_be_written: threading.Event, kind: str, stream: bool
) -> None:
    fault = (lambda entry: "numeric" if entry.output_index == 5 else None) if kind == "error" else None
    asked = body(1, 2000 if kind == "cancelled" else 20)
    served_by = runner(0.005, decode_fault=fault)
    with daemon_of(durable_config(tmp_path), served_by) as served, served.submit() as peer:
        peer.send("generate", id="a", stream=stream, **asked)
        assert peer.receive()["type"] == "accepted"
        if kind == "cancelled":
            peer.send("cancel", id="a")
        outcome = {"done": "length", "cancelled": "cancelled", "error": "failed"}[kind]
        wait_until(lambda: served.metric("mlxd_requests_total", tenant="acme", outcome=outcome) == 1)
        peer.send("ping", id="p")
        before = []
        while (message := peer.receive())["type"] != "pong":
            before.append(message)
        assert {message["type"] for message in before} <= {"chunk", "ok"}
        if stream and kind == "done":
            assert tokens(before) == expected(1, 20)
        with served.submit() as other:
            other.send("resume", id="a")
            assert other.receive()["type"] == "accepted"
            ends_may_be_written.set()
            assert other.until_terminal("a")[-1]["type"] == kind
    assert open_entries(tmp_path / "journal") == [("a", True)]


def test_a_request_whose_end_was_not_written_when_the_daemon_was_killed_was_not_told_its_end(
    tmp_path: Path,
) -> None:
    config = durable_config(tmp_path)
    with fault_process(tmp_path, config, "begin a write", "kill") as first, first.peer() as peer:
        peer.send("generate", id="a", **body(1))
        assert [peer.receive()["type"] for _ in range(2)] == ["accepted", "chunk"]
        first.arm()
        collector = Collector(peer)
        assert first.process.wait(10) == -9
        collector.stop()
    told = tokens(collector.messages)
    assert told == expected(1)[1 : 1 + len(told)]  # the last of it may have died with the process
    assert len(told) > 1
    assert {message["type"] for message in collector.messages} == {"chunk"}
    with fault_process(tmp_path, config) as second, second.peer() as peer:
        peer.send("resume", id="a")
        assert tokens(peer.until_terminal("a")) == expected(1)


def test_an_end_that_cannot_be_written_leaves_all_the_same_and_its_request_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config, write = durable_config(tmp_path), JournalFile.write

    def no_end(file: JournalFile, changes: Sequence[Change]) -> list[JournalError | None]:
        if is_end(changes):
            raise JournalError("journal_failed", "the disk is full")
        return write(file, changes)

    with monkeypatch.context() as patch, daemon_of(config, runner()) as served, served.submit() as peer:
        patch.setattr(JournalFile, "write", no_end)
        peer.send("generate", id="a", **body(1))
        assert tokens(peer.until_terminal("a")) == expected(1)
        wait_until(lambda: served.metric("mlxd_journal_changes_total", result="failed") == 1)
    assert "journal: a change was not written (End): the disk is full" in caplog.messages
    assert open_entries(tmp_path / "journal") == [("a", False)]
    with daemon_of(config, runner()) as served, served.submit() as peer:
        peer.send("resume", id="a")
        assert tokens(peer.until_terminal("a")) == expected(1)


def test_a_journal_that_hangs_at_the_end_is_no_good_end_and_its_clients_are_told(
    tmp_path: Path, ends_may_be_written: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "CLOSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(server, "WRITE_TIMEOUT_S", 0.1)
    config = durable_config(tmp_path)
    config = replace(config, server=replace(config.server, drain_timeout_s=0.1))
    with daemon_of(config, runner()) as served, served.submit() as peer:
        peer.send("generate", id="a", **body(1))
        assert peer.receive()["type"] == "accepted"
        served.server.request_drain()
        assert tokens(messages := peer.until_terminal("a")) == expected(1)
        assert messages[-1]["type"] == "done"
    assert served.exit_code == 1


def test_one_tenant_cannot_fill_the_journal_for_others(tmp_path: Path) -> None:
    config = durable_config(tmp_path, max_bytes="1MiB")
    stop = [chr(0x1F600 + number) * 256 for number in range(16)]
    with daemon_of(config, runner(0.005)) as served, served.submit() as flood, served.submit("beta") as quiet:
        for seed in range(100):
            flood.send("generate", id=str(seed), prompt="hi", sampling={"max_tokens": 400, "stop": stop})
        reasons = set()
        while "journal_full" not in reasons:
            reasons.add(flood.receive().get("reason"))
        for seed in range(5):
            quiet.send("generate", id=str(seed), prompt="hi", sampling={"max_tokens": 3, "stop": stop})
            assert quiet.until_terminal(str(seed))[-1]["type"] == "done"


def test_requests_of_a_tenant_that_is_no_more_are_dropped(tmp_path: Path) -> None:
    config = durable_config(tmp_path)
    with daemon_of(config, runner()) as served, served.submit("beta") as peer:
        peer.send("generate", id="a", **body(1))
        peer.until_terminal("a")
    assert open_entries(tmp_path / "journal") == [("a", True)]
    smaller = replace(config, tenants=tuple(t for t in config.tenants if t.name != "beta"))
    with daemon_of(smaller, runner()):
        pass
    assert open_entries(tmp_path / "journal") == []


@pytest.mark.parametrize("fsync", ["always", "never"])
def test_what_ended_is_forgotten_after_its_time(tmp_path: Path, fsync: str) -> None:
    config = durable_config(tmp_path, fsync=fsync)
    config = replace(config, server=replace(config.server, retention_s=1.0))
    with daemon_of(config, runner()) as served, served.submit() as peer:
        peer.send("generate", id="a", **body(1))
        peer.until_terminal("a")

        def is_gone() -> bool:
            peer.send("resume", id="a")
            return bool(peer.until_terminal("a")[-1]["type"] == "error")

        wait_until(is_gone)
    assert open_entries(tmp_path / "journal") == []
