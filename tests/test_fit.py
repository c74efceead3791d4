"""Settings that only the model shows to be wrong."""

import re
from pathlib import Path

import pytest
from daemon_process import process_config, write_config, write_tiny_model
from msgspec.structs import replace
from scheduling import make_config, make_tenant

from mlxd.batching.errors import SettingError
from mlxd.batching.fake_runner import FakeRunner, fake_memory
from mlxd.caches.disk_store import DiskStore
from mlxd.caches.sizing import GroupPlan, GroupSpec, MemoryPlan, plan_memory
from mlxd.scheduler import cli
from mlxd.scheduler.config import CacheConfig, DiskConfig, JournalConfig
from mlxd.scheduler.engine import Engine
from mlxd.scheduler.fit import check_disk, check_shares, longest_context

PAGE = 16


def plan(budget_pages: int, *, window: int | None = None, max_model_len: int = 160) -> MemoryPlan:
    """One group of pages of 16 positions, a byte each, for 4 rows."""
    spec = GroupSpec(name="g", layers=(0,), window=window, page_size=PAGE, bytes_per_token=1)
    return plan_memory(
        (spec,),
        budget_bytes=budget_pages * PAGE,
        weights_bytes=0,
        max_rows=4,
        max_model_len=max_model_len,
        chunk=PAGE,
    )


@pytest.mark.parametrize(
    ("memory", "positions"),
    [
        (plan(40), 160),
        (plan(10), 160),
        (plan(7), 112),
        (plan(4, window=32), 160),
        (plan(2, window=32), 32),
    ],
    ids=["all rows", "one row", "less than a row", "window", "less than a window"],
)
def test_the_longest_context_is_what_the_pages_hold(memory: MemoryPlan, positions: int) -> None:
    assert longest_context(memory) == positions


@pytest.mark.parametrize(("share", "fits"), [(1.0, True), (0.1, True), (0.09, False)])
def test_a_share_holds_at_least_a_page(share: float, fits: bool) -> None:
    config = make_config(make_tenant("whole"), make_tenant("acme", kv_share=share))
    if fits:
        check_shares(config, plan(10))
        return
    with pytest.raises(
        SettingError, match=r"^tenants\[1\].kv_share is 0.09, 14 of 160 KV bytes; .* needs 16$"
    ):
        check_shares(config, plan(10))


def test_reserves_that_leave_a_tenant_nothing_are_refused() -> None:
    config = make_config(make_tenant("acme"), make_tenant("greedy", kv_reserve=1.0))
    with pytest.raises(SettingError, match="the kv_reserve of others leaves 'acme' 0 KV bytes; the smallest"):
        check_shares(config, fake_memory(max_rows=2, max_model_len=64))
    check_shares(make_config(make_tenant("greedy", kv_reserve=1.0)), fake_memory(max_rows=2))


def test_an_engine_does_not_start_with_a_tenant_that_could_never_run() -> None:
    config = make_config(make_tenant("acme", kv_share=1e-6))
    memory = fake_memory(max_rows=2, max_model_len=64)
    with Engine(config, runner_factory=lambda config, progress: FakeRunner(memory)) as engine:
        engine.start(lambda events: None)
        with pytest.raises(SettingError, match="kv_share is 1e-06"):
            engine.wait_ready(5)


@pytest.mark.parametrize(
    ("path", "max_bytes", "message"),
    [
        ("{tmp}/new/folder", "2MiB", None),
        ("{tmp}", "2MiB", None),
        ("{tmp}", "1MiB", "max_bytes is 1MiB; one page of this model takes 1 MiB, and two must fit"),
        ("{tmp}/file", "2MiB", "path is '{tmp}/file'; it is not a folder"),
        ("{tmp}/file/below", "2MiB", "path is '{tmp}/file/below'; {tmp}/file is not a folder"),
    ],
    ids=["made later", "there", "too small", "a file", "below a file"],
)
def test_a_disk_is_a_folder_with_room_for_pages(
    tmp_path: Path, path: str, max_bytes: str, message: str | None
) -> None:
    (tmp_path / "file").write_text("")
    disk = DiskConfig(path=path.format(tmp=tmp_path), max_bytes=max_bytes)
    group = GroupSpec(name="g", layers=(0,), window=None, page_size=PAGE, bytes_per_token=2**16)
    memory = MemoryPlan(0, 2**30, 4, 160, PAGE, (GroupPlan(group, 8),))
    if message is None:
        check_disk(disk, memory)
        return
    with pytest.raises(SettingError, match=f"^{re.escape('cache.disk.' + message.format(tmp=tmp_path))}$"):
        check_disk(disk, memory)


def test_check_tells_what_the_disk_holds_and_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_model(tmp_path)
    folder, missing = tmp_path / "prefixes", tmp_path / "later"
    store = DiskStore(folder, 2**20)
    store.write(b"key", [b"x" * 1536])
    store.close()
    for path, line in ((folder, "1 pages, 1.5 KiB of 4 MiB"), (missing, "0 pages, 0 B of 4 MiB")):
        cache = CacheConfig(budget="8MiB", disk=DiskConfig(path=str(path), max_bytes="4MiB"))
        config = replace(process_config(tmp_path, tmp_path), cache=cache)
        assert cli.run(["check", str(write_config(tmp_path, config))]) == 0
        assert f"disk           {path}: {line}" in capsys.readouterr().out.splitlines()
    assert not missing.exists()


def test_an_engine_does_not_start_with_a_disk_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = CacheConfig(disk=DiskConfig(path=str(tmp_path / "file"), max_bytes="1GiB"))
    config = replace(make_config(), cache=cache)
    memory = fake_memory(max_rows=2, max_model_len=64)
    with Engine(config, runner_factory=lambda config, progress: FakeRunner(memory)) as engine:
        engine.start(lambda events: None)
        with pytest.raises(SettingError, match=r"cache.disk.path is .*; it is not a folder"):
            engine.wait_ready(5)


def test_check_names_the_line_of_what_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_model(tmp_path)
    config = process_config(tmp_path, tmp_path)
    poor = replace(config.tenants[1], kv_share=1e-4)
    path = write_config(tmp_path, replace(config, tenants=(config.tenants[0], poor)))
    assert cli.run(["check", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"mlxd: {path}:1: tenants[1].kv_share is 0.0001, ")


@pytest.mark.parametrize(
    ("name", "mode", "why"),
    [
        ("none/j", None, "the folder {tmp}/none does not exist"),
        ("open/j", 0o755, "the folder {tmp}/open has mode 0755, so others may use it; it must be 0700"),
    ],
)
def test_check_and_serve_refuse_a_place_for_the_journal_alike(
    tmp_path: Path, name: str, mode: int | None, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_model(tmp_path)
    if mode is not None:
        (tmp_path / "open").mkdir()
        (tmp_path / "open").chmod(mode)
    place = str(tmp_path / name)
    config = replace(
        process_config(tmp_path, tmp_path), journal=JournalConfig(durability="accepted", path=place)
    )
    path = write_config(tmp_path, config)
    for verb in ("check", "serve"):
        assert cli.run([verb, str(path)]) == 2
        line = f"mlxd: {path}:1: journal.path is {place!r}: {why.format(tmp=tmp_path)}\n"
        assert capsys.readouterr().err.endswith(line)
    assert not Path(place).exists()


def test_check_tells_what_part_of_the_context_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_model(tmp_path)
    path = write_config(tmp_path, process_config(tmp_path, tmp_path, budget="1MiB"))
    assert cli.run(["check", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "max context    8192 tokens, of which 4096 fit the budget" in lines
    assert all(line == line.rstrip() for line in lines)
