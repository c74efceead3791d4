"""Damaged pages on disk: counted, removed, computed anew, and never taken."""

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from disk_machine import KINDS, NEVER_S, PAGE, Machine, misses, serve, tokens_of
from scheduling import VOCAB, make_config, make_tenant, submission

from mlxd.batching.fake_runner import FakeRunner, fake_completion, fake_memory
from mlxd.batching.plan import DecodeEntry
from mlxd.caches import disk_store
from mlxd.caches.disk_store import DiskStore
from mlxd.caches.disk_tier import DiskTier
from mlxd.caches.persistence import PageCodec, PageName
from mlxd.scheduler.events import RequestKey


@pytest.fixture
def machine(tmp_path: Path):  # type: ignore[no-untyped-def]
    made = Machine(tmp_path)
    yield made
    made.stop()


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

    write = disk_store.write_synced
    monkeypatch.setattr(disk_store, "write_synced", write_slowly)
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
