"""Prefixes on disk through the scheduler: found after a restart, and nothing wrong is ever taken."""

import errno
import logging
import random
import threading
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import pytest
from scheduling import VOCAB, World, make_config, make_tenant, submission

from mlxd.batching import fake_runner
from mlxd.batching.fake_runner import FakeRunner, fake_completion, fake_memory
from mlxd.batching.plan import DecodeEntry
from mlxd.caches import disk_store
from mlxd.caches.disk_store import DiskStore
from mlxd.caches.disk_tier import DiskTier
from mlxd.caches.persistence import PageCodec, PageName
from mlxd.scheduler.config import Config
from mlxd.scheduler.events import Finished, RequestKey, Tokens

PAGE, CHUNK = 8, 16
PROMPT = tuple(range(100, 140))
NEVER_S = 1e9


KINDS: dict[str, dict[str, object]] = {
    "full": {},
    "full and sliding": {"window": 20, "num_window_pages": 50},
    "full and state": {"has_state": True, "num_states": 24},
    "state": {"has_full": False, "has_state": True, "num_states": 24},
    "all": {"window": 12, "has_state": True, "boundary": 32},
}
"""Groups of a model."""


class Machine:
    """A folder, and a world that is started anew on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(
        self,
        config: Config | None = None,
        *,
        max_bytes: int = 10**6,
        step_s: float = NEVER_S,
        clock: Callable[[], float] = lambda: 0.0,
        queue_bytes: int = 10**6,
        num_pages: int | None = None,
        decode_fault: Callable[[DecodeEntry], str | None] | None = None,
        prefill_s_per_token: float = 0.0,
        kind: str = "full",
    ) -> World:
        sizes: dict[str, object] = {"chunk": CHUNK, "page_size": PAGE, "num_pages": num_pages}
        memory = fake_memory(max_rows=8, max_model_len=256, **(sizes | KINDS[kind]))  # type: ignore[arg-type]
        runner = FakeRunner(
            memory, vocab_size=VOCAB, decode_fault=decode_fault, prefill_s_per_token=prefill_s_per_token
        )
        store = DiskStore(self.folder, max_bytes)
        codec = PageCodec(runner.page_formats, store.secret)
        self.tier = DiskTier(store, codec, clock=clock, step_s=step_s, queue_bytes=queue_bytes)
        return World(config or make_config(), runner, disk=self.tier, secret=store.secret)

    def stop(self) -> None:
        """Once more is harmless."""
        self.tier.close()

    def restart(self, config: Config | None = None, **settings: object) -> World:
        self.stop()
        return self.start(config, **settings)  # type: ignore[arg-type]

    @property
    def files(self) -> list[Path]:
        """Oldest first; not one that is being written."""
        return sorted((self.folder / "pages").glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)


@pytest.fixture
def machine(tmp_path: Path):  # type: ignore[no-untyped-def]
    made = Machine(tmp_path)
    yield made
    made.stop()


def serve(world: World, request_id: str, prompt: Sequence[int] = PROMPT, **fields: object) -> int:
    """Run it alone to its end, check its tokens; tokens of the prompt that were found."""
    world.submit(submission(request_id, prompt, **fields))  # type: ignore[arg-type]
    world.run()
    ends = {e.key.request_id: e for e in world.events if isinstance(e, Finished)}
    tokens = tokens_of(world, request_id)
    assert tokens == fake_completion(prompt, 7, len(tokens), VOCAB)
    return ends[request_id].usage.cached_tokens


def tokens_of(world: World, request_id: str) -> list[int]:
    events = (e for e in world.events if isinstance(e, Tokens) and e.key.request_id == request_id)
    return [token for event in events for token in event.token_ids]


def misses(machine: Machine) -> dict[str, int]:
    return {reason: number for reason, number in machine.tier.stats.misses.items() if number}


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


def truncate(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path, other: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def swap(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())


def older(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"mlxd-page/1", b"mlxd-page/0"))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(truncate, "truncated"), (empty, "truncated"), (flip, "corrupt"), (swap, "foreign"), (older, "foreign")],
)
@pytest.mark.parametrize("index", [0, 2, 3])
def test_a_bad_file_ends_what_is_found_is_counted_removed_and_made_anew(
    machine: Machine, damage: Callable[[Path, Path], None], reason: str, index: int
) -> None:
    serve(machine.start(), "cold")
    machine.stop()
    files = machine.files
    damage(files[index], files[index - 1])
    world = machine.start()
    assert serve(world, "warm") == index * PAGE
    assert misses(machine) == {reason: 1}
    assert serve(machine.restart(), "again") == 32
    assert misses(machine) == {}


def test_a_file_that_is_gone_is_a_miss(machine: Machine) -> None:
    serve(machine.start(), "cold")
    world = machine.restart()
    machine.files[1].unlink()
    assert serve(world, "warm") == PAGE
    assert misses(machine) == {"absent": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_a_faulty_row_began_with_stays_on_disk(machine: Machine, kind: str) -> None:
    serve(machine.start(kind=kind), "cold")
    machine.stop()
    assert machine.files

    def fault(entry: DecodeEntry) -> str | None:
        return "numeric" if entry.position == 41 else None

    world = machine.restart(decode_fault=fault, kind=kind)
    assert serve(world, "bad", max_tokens=9) == 32
    machine.stop()
    assert machine.files == []
    assert serve(machine.start(kind=kind), "after") == 0


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
    assert machine.tier.is_off
    assert machine.files == []
    assert serve(world, "warm", range(60)) == 56


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_random_arrivals_cancels_evictions_damage_and_restarts_never_give_a_wrong_token(
    machine: Machine, seed: int, kind: str
) -> None:
    rng = random.Random(seed)
    config = make_config(make_tenant("acme"), make_tenant("beta"), overcommit=rng.choice([1.0, 3.0]))
    found = 0
    for life in range(4):
        max_bytes = 10**6 if life < 2 else 8_000
        world = machine.start(config, num_pages=40, max_bytes=max_bytes, kind=kind)
        prompts: dict[str, tuple[int, ...]] = {}
        for number in range(25):
            name = f"{life}.{number}"
            base = rng.randrange(3) * 100
            prompts[name] = (
                *range(base, base + rng.randrange(1, 90)),
                *[rng.randrange(9)] * rng.randrange(3),
            )
            tenant = rng.choice(["acme", "beta"])
            world.submit(submission(name, prompts[name], max_tokens=rng.randrange(1, 20), tenant=tenant))
            for _ in range(rng.randrange(4)):
                world.turn()
            if rng.random() < 0.2:
                world.cancel(RequestKey(tenant, name))
        world.run()
        for name, prompt in prompts.items():
            tokens = tokens_of(world, name)
            assert tokens == fake_completion(prompt, 7, len(tokens), VOCAB)
        found += machine.tier.stats.pages["loaded"]
        machine.stop()
        for path in rng.sample(machine.files, min(3, len(machine.files))):
            rng.choice([truncate, flip, older])(path, path)
    assert found > 0


def test_a_page_that_is_saved_again_while_its_bad_self_is_written_is_the_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A faulty row's page is on its way to the disk, is dropped, and comes again from a row that is right."""
    codec = PageCodec(FakeRunner(fake_memory(page_size=PAGE)).page_formats, b"")
    store = DiskStore(tmp_path, 10**6)
    writing, go_on = threading.Event(), threading.Event()

    def write_slowly(path: Path, parts: Sequence[bytes]) -> None:
        if path.suffix == ".tmp":
            writing.set()
            go_on.wait()
        write(path, parts)

    write = disk_store._write_synced
    monkeypatch.setattr(disk_store, "_write_synced", write_slowly)
    tier = DiskTier(store, codec, clock=lambda: 0.0, step_s=NEVER_S)
    name = PageName(b"k" * 32, b"p" * 32, 0)
    size = codec.formats[0].page_bytes
    tier.save(name, bytes(size))
    writing.wait()
    tier.remove([name.key])
    tier.save(name, b"\1" * size)
    go_on.set()
    tier.close()
    data = store.read(name.file)
    assert data is not None
    assert codec.decode(name, data) == b"\1" * size
    assert tier.stats.pages["saved"] == 1
