"""Prefixes on disk through the scheduler: found after a restart, and nothing wrong is ever taken."""

import errno
import logging
import threading
from itertools import count
from pathlib import Path

import pytest
from disk_machine import CHUNK, KINDS, PAGE, PROMPT, Machine, misses, serve, tokens_of
from scheduling import make_config, make_tenant, submission

from mlxd.batching import fake_runner
from mlxd.caches import disk_store
from mlxd.caches.disk_store import DiskStore
from mlxd.caches.persistence import PageName


@pytest.fixture
def machine(tmp_path: Path):  # type: ignore[no-untyped-def]
    made = Machine(tmp_path)
    yield made
    made.stop()


@pytest.mark.parametrize(
    ("num_prompt", "found"),
    [(1, 0), (PAGE, 0), (PAGE + 1, PAGE), (3 * PAGE, 2 * PAGE), (3 * PAGE + 1, 3 * PAGE), (43, 5 * PAGE)],
)
def test_after_a_restart_all_full_pages_but_the_last_positions_are_found(
    machine: Machine, num_prompt: int, found: int
) -> None:
    prompt = tuple(range(num_prompt))
    assert serve(machine.start(), "cold", prompt) == 0
    assert serve(machine.restart(), "warm", prompt) == found
    assert machine.tier.stats.pages["loaded"] == found // PAGE


def test_pages_found_on_disk_are_shared_in_memory_at_once(machine: Machine) -> None:
    serve(machine.start(), "cold")
    world = machine.restart()
    for name in "abc":
        world.submit(submission(name, (*PROMPT, ord(name))))
    world.run()
    assert [stats.cached_tokens for stats in world.tape.requests] == [40] * 3
    assert machine.tier.stats.pages["loaded"] == 5


def test_a_prefix_that_memory_gave_up_is_found_on_disk(machine: Machine) -> None:
    world = machine.start(num_pages=12)
    serve(world, "first")
    serve(world, "large", tuple(range(90)))
    assert world.scheduler.space.num_evicted == 5
    assert serve(world, "again") == 32


def test_a_growing_chat_goes_on_over_restarts(machine: Machine) -> None:
    prompt, reusable = PROMPT[:21], 0
    machine.start()
    for turn in range(4):
        world = machine.restart()
        assert serve(world, str(turn), prompt, max_tokens=9) == reusable
        reusable = (len(prompt) + 9 - 1) // PAGE * PAGE
        prompt += (*tokens_of(world, str(turn)), 5, 6)


def test_tenants_never_share_neither_now_nor_after_a_restart(machine: Machine) -> None:
    config = make_config(make_tenant("acme"), make_tenant("beta"))
    world = machine.start(config)
    assert serve(world, "a", tenant="acme") == 0
    assert serve(world, "b", PROMPT[:20], tenant="beta") == 0
    world = machine.restart(config)
    assert serve(world, "b", (*PROMPT[:16], *range(20)), tenant="beta") == 16
    assert machine.tier.stats.pages["loaded"] == 2
    assert serve(world, "a", tenant="acme") == 32


def test_a_file_tells_no_tenant_and_no_token_that_could_be_guessed(tmp_path: Path) -> None:
    """The same prompt of the same tenant has other keys in another folder."""
    keys = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        machine = Machine(folder)
        serve(machine.start(), "x")
        machine.stop()
        keys.append({path.name for path in machine.files})
        assert not any(b"acme" in path.read_bytes() for path in machine.files)
    assert len(keys[0]) == len(keys[1]) == 5
    assert not keys[0] & keys[1]


def test_another_models_pages_are_never_asked_for(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(machine.start(), "cold")
    machine.stop()
    info = fake_runner.RunnerInfo
    monkeypatch.setattr(fake_runner, "RunnerInfo", lambda **f: info(**{**f, "fingerprint": "other"}))
    assert serve(machine.start(), "warm") == 0
    assert misses(machine) == {"absent": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_restart_a_chat_of_any_kind_goes_on_where_it_was(machine: Machine, kind: str) -> None:
    prompt, reusable, stride = PROMPT, 0, CHUNK if kind == "state" else PAGE
    machine.start(kind=kind)
    for turn in range(3):
        world = machine.restart(kind=kind)
        assert serve(world, str(turn), prompt, max_tokens=30) == reusable
        reusable = (len(prompt) + 30 - 1) // stride * stride
        prompt += (*tokens_of(world, str(turn)), 5, 6)


@pytest.mark.parametrize("kind", KINDS)
def test_with_little_time_to_load_what_was_loaded_is_there_the_next_time(machine: Machine, kind: str) -> None:
    serve(machine.start(kind=kind), "cold")
    ticks = count()
    world = machine.restart(clock=lambda: float(next(ticks)), step_s=1.5, kind=kind)
    prompts = [(*PROMPT, number) for number in range(5)]
    assert [serve(world, str(n), prompt) for n, prompt in enumerate(prompts)][-1] >= 32


def test_loading_ends_when_the_steps_time_is_over(machine: Machine) -> None:
    serve(machine.start(), "cold")
    ticks = count()
    world = machine.restart(clock=lambda: float(next(ticks)), step_s=1.5)
    assert serve(world, "warm") == 2 * PAGE
    assert misses(machine) == {"busy": 1}


def test_a_disk_that_is_slower_than_computing_is_not_asked_until_some_time_later(machine: Machine) -> None:
    serve(machine.start(), "cold", tuple(range(60)))
    ticks = count()
    world = machine.restart(clock=lambda: float(next(ticks)), prefill_s_per_token=0.02)
    assert serve(world, "unknown speed", PROMPT) == 0
    assert serve(world, "first", tuple(range(60))) == PAGE
    assert misses(machine)["slow"] == 1
    name = PageName(bytes.fromhex(machine.files[0].stem), b"", 0)
    assert machine.tier.load(name, worth_s=0.16) is None
    assert misses(machine).get("foreign", 0) == 0
    for _ in range(100):
        machine.tier.load(name, worth_s=0.16)
    assert misses(machine)["foreign"] == 1, "it was read at last, by a wrong name"


def test_the_budget_holds_while_the_daemon_runs(machine: Machine) -> None:
    world = machine.start(max_bytes=5000)
    for number in range(20):
        serve(world, str(number), tuple(range(number, number + 60)))
        assert machine.tier.stats.used_bytes <= 5000
    machine.stop()
    stats = machine.tier.stats
    assert stats.used_bytes == sum(path.stat().st_size for path in machine.files) <= 5000
    assert stats.pages["evicted"] > 50


def test_what_the_disk_cannot_take_in_time_waits_and_is_saved_when_idle(machine: Machine) -> None:
    world = machine.start(queue_bytes=0)
    serve(world, "long", tuple(range(200)))
    machine.stop()
    assert machine.tier.stats.pages["saved"] == len(machine.files) == 25
    assert machine.tier.stats.pages["dropped"] == 0


def test_a_full_queue_drops_and_counts(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = threading.Event()
    monkeypatch.setattr(DiskStore, "write", lambda self, key, parts: blocked.wait(10))
    machine.start(queue_bytes=0)
    payload = bytes(PAGE * 8)
    for number in range(5):
        machine.tier.save(PageName(bytes([number]) * 32, b"", 0), payload)
    assert machine.tier.room() == 0
    assert machine.tier.stats.pages["dropped"] == 3
    blocked.set()


def test_a_disk_that_fills_up_is_one_warning_and_serving_goes_on(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    world = machine.start()
    monkeypatch.setattr(disk_store.os, "fsync", full)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            serve(world, str(number), tuple(range(number, number + 60)))
            machine.tier._writer.join(0.2)
    assert [record.getMessage() for record in caplog.records] == [
        "the disk tier is off: [Errno 28] No space left on device"
    ]
    assert machine.tier.stats.is_off
    assert machine.files == []
    assert serve(world, "warm", range(60)) == 56
