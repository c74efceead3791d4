"""Whose pages those on disk are, where tenants come and go."""

import errno
from pathlib import Path

import pytest
from disk_machine import Machine, serve
from scheduling import World, make_config, make_tenant

from mlxd.caches import disk_store
from mlxd.caches.disk_store import DiskStore

BOTH = make_config(make_tenant("acme"), make_tenant("beta"))
WITHOUT_ACME = make_config(make_tenant("beta"))
WORDS = {"acme": "one", "beta": "two"}


@pytest.fixture
def machine(tmp_path: Path):  # type: ignore[no-untyped-def]
    made = Machine(tmp_path)
    yield made
    made.stop()


def reload(world: World, *names: str) -> None:
    world.events += world.scheduler.set_tenants([make_tenant(name) for name in names], world.now)


def test_a_tenant_that_stays_finds_its_pages_whoever_comes_and_goes(machine: Machine) -> None:
    world = machine.start(WITHOUT_ACME)
    serve(world, "cold", tenant="beta")
    reload(world, "beta", "acme")
    assert serve(machine.restart(WITHOUT_ACME), "warm", tenant="beta") == 32


@pytest.mark.parametrize("is_restarted", [False, True])
def test_who_gets_the_name_of_a_tenant_that_left_at_a_reload_finds_nothing_of_it(
    machine: Machine, is_restarted: bool
) -> None:
    world = machine.start(BOTH)
    serve(world, "cold")
    reload(world, "beta")
    reload(world, "beta", "acme")
    if is_restarted:
        world = machine.restart(BOTH)
    assert serve(world, "new") == 0
    assert serve(machine.restart(BOTH), "warm") == 32


def test_who_gets_the_name_of_a_tenant_that_a_start_lacked_finds_nothing_of_it(machine: Machine) -> None:
    serve(machine.start(BOTH), "cold")
    machine.restart(WITHOUT_ACME)
    assert serve(machine.restart(BOTH), "new") == 0


def test_a_name_given_up_while_the_disk_fails_is_nobodys(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = machine.start(BOTH)
    serve(world, "cold")

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk_store.os, "fsync", full)
        reload(world, "beta")
        reload(world, "beta", "acme")
    assert machine.tier.is_off
    assert serve(world, "new") == 0
    assert serve(machine.restart(BOTH), "newer") == 0


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b'{"acme": 1}', b"\xff\xfe"])
def test_damaged_words_are_none(tmp_path: Path, content: bytes) -> None:
    store = DiskStore(tmp_path, 1000)
    store.write_words(WORDS)
    assert store.read_words() == WORDS
    (tmp_path / "tenants").write_bytes(content)
    assert store.read_words() == {}
    store.close()
