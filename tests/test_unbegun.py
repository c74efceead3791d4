"""Requests that the engine does not have yet: they end in time, and when they are told to."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from fault_process import durable_config
from wire_daemon import Daemon, daemon_of, runner

from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.events import RequestKey
from mlxd.scheduler.journal_entries import Accept, Begun, Start
from mlxd.scheduler.journal_file import JournalFile
from mlxd.scheduler.messages import Generate

ENDLESS = SamplingParams(max_tokens=4000, ignore_eos=True, seed=1)


@contextmanager
def taken_over(folder: Path, *left: Generate, begun: Begun, max_waiting: int = 64) -> Iterator[Daemon]:
    """A daemon with one row a tenant whose predecessor left these requests of acme open."""
    config = durable_config(folder)
    limits = {"max_running": 1, "max_waiting": max_waiting}
    tenants = tuple(msgspec.structs.replace(tenant, **limits) for tenant in config.tenants)
    file = JournalFile(config.journal.path, fsync=False, max_bytes=2**20)
    for message in left:
        key = RequestKey("acme", message.id)
        file.write([Accept(key, b"", message), Start(key, begun)])
    file.close()
    with daemon_of(msgspec.structs.replace(config, tenants=tenants), runner(0.01)) as served:
        yield served


def endless(name: str) -> Generate:
    return Generate(id=name, prompt="hi", sampling=ENDLESS)


@pytest.mark.parametrize("sent_before", [False, True])
def test_a_deadline_is_kept_while_a_suspect_runs_alone(tmp_path: Path, sent_before: bool) -> None:
    """By those that were sent, and by those that an earlier process left open."""
    late = msgspec.structs.replace(endless("late"), deadline_ms=300)
    left = [endless("suspect"), late] if sent_before else [endless("suspect")]
    with taken_over(tmp_path, *left, begun=Begun.AGAIN) as served, served.submit() as peer:
        if sent_before:
            peer.send("resume", id="late")
            assert peer.receive()["type"] == "accepted"
        else:
            peer.raw(msgspec.msgpack.encode(late))
        end = peer.until_terminal("late", 2.0)[-1]
        assert (end["type"], end["code"]) == ("error", "expired")
        assert "the deadline passed after 0." in end["message"]
        with served.control() as control:
            assert control.ask("cancel", id="suspect")["result"] == "cancelling"


def test_one_that_waits_for_room_keeps_its_deadline_and_ends_at_once_when_it_is_cancelled(
    tmp_path: Path,
) -> None:
    left = [endless("runs"), endless("waits"), endless("cancelled")]
    late = msgspec.structs.replace(endless("late"), deadline_ms=1500)
    with (
        taken_over(tmp_path, *left, late, begun=Begun.ONCE, max_waiting=1) as served,
        served.submit() as peer,
        served.control() as control,
    ):
        for name in ("cancelled", "late"):
            peer.send("resume", id=name)
            assert peer.receive()["type"] == "accepted"
        assert control.ask("cancel", id="cancelled")["result"] == "cancelling"
        assert peer.until_terminal("cancelled", 0.5)[-1]["type"] == "cancelled"
        assert peer.until_terminal("late", 3.0)[-1]["code"] == "expired"
        assert served.metric("mlxd_requests_running", tenant="acme") == 1
        for name in ("runs", "waits"):
            control.ask("cancel", id=name)
