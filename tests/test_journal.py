"""Durable requests: what was accepted is answered, whatever happens to the process in between."""

from pathlib import Path

import pytest
from fault_process import NUM_TOKENS, body, durable_config, expected, fault_process, tokens
from msgspec.structs import replace
from wire_daemon import TERMINAL, daemon_of, runner, wait_until

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


def test_a_request_that_ends_the_daemon_each_time_is_given_up(tmp_path: Path) -> None:
    config = durable_config(tmp_path)
    for start in range(3):
        with fault_process(tmp_path, config) as daemon, daemon.peer() as peer:
            message = "resume" if start else "generate"
            peer.send(message, id="poison", **({} if start else body(1)))
            assert peer.receive()["type"] == "accepted"
            daemon.kill()
    with fault_process(tmp_path, config) as daemon, daemon.peer() as peer:
        peer.send("resume", id="poison")
        end = peer.until_terminal("poison")[-1]
    assert (end["code"], end["message"]) == (
        "engine_failed",
        "the daemon ended 3 times before this request did",
    )


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
