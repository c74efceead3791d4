"""The folder of pages: its budget, its order, and what a killed process or a bad disk leaves."""

import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mlxd.caches import disk_store
from mlxd.caches.disk_store import DiskStore, FolderInUseError


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def files(folder: Path) -> list[Path]:
    return sorted((folder / "pages").iterdir())


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in files(folder))


def test_what_is_written_is_read_also_after_a_restart(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 1000)
    assert store.write(key(1), [b"head", b"planes"])
    assert store.read(key(1)) == b"headplanes"
    assert store.read(key(2)) is None
    store.close()
    again = DiskStore(tmp_path, 1000)
    assert again.read(key(1)) == b"headplanes"
    assert (again.secret, again.used_bytes, len(again)) == (store.secret, 10, 1)
    again.close()


def test_the_secret_and_the_files_are_the_owners_alone(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "new" / "folder", 1000)
    store.write(key(1), [b"x"])
    modes = {
        path.stat().st_mode & 0o777 for path in (tmp_path / "new" / "folder").rglob("*") if path.is_file()
    }
    assert modes == {0o600}
    assert len(store.secret) == 32
    store.close()


@pytest.mark.parametrize("seed", range(5))
def test_the_budget_is_never_exceeded_and_the_latest_used_stay(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    store = DiskStore(tmp_path, 100)
    used: list[int] = []
    for _ in range(120):
        number = rng.randrange(30)
        if number in used and rng.random() < 0.5:
            store.touch(key(number))
            used.remove(number)
        else:
            assert store.write(key(number), [bytes(rng.randrange(5, 25))])
            used = [n for n in used if n != number]
        used.append(number)
        held = [n for n in used if key(n) in store]
        assert held == used[len(used) - len(held) :]
        used = held
        assert store.used_bytes == on_disk(tmp_path) <= 100
    assert store.num_evicted > 10
    store.close()


def test_what_is_larger_than_the_budget_is_not_stored(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 100)
    store.write(key(1), [b"x"])
    assert not store.write(key(2), [bytes(101)])
    assert files(tmp_path) == [tmp_path / "pages" / f"{key(1).hex()}.safetensors"]
    store.close()


def test_a_smaller_budget_after_a_restart_keeps_the_latest_used(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 1000)
    for number in range(5):
        store.write(key(number), [bytes(10)])
        os.utime(tmp_path / "pages" / f"{key(number).hex()}.safetensors", ns=(0, number))
    store.close()
    again = DiskStore(tmp_path, 25)
    assert [number for number in range(5) if key(number) in again] == [3, 4]
    again.close()


def test_files_of_others_are_left_alone_and_not_counted(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "notes.txt").write_bytes(b"mine")
    (pages / "zz.safetensors").write_bytes(b"mine")
    (pages / f"{'ab' * 32}.safetensors").mkdir()
    (pages / f"{'cd' * 32}.safetensors").symlink_to("nowhere")
    (pages / "folder.tmp").mkdir()
    store = DiskStore(tmp_path, 1000)
    assert (len(store), store.used_bytes) == (0, 0)
    assert len(list(pages.iterdir())) == 5
    store.close()


def test_a_file_that_somebody_removed_is_absent_and_no_longer_counted(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 1000)
    store.write(key(1), [b"x"])
    store.write(key(2), [b"y"])
    for path in files(tmp_path):
        path.unlink()
    assert store.read(key(1)) is None
    store.touch(key(2))
    assert (len(store), store.used_bytes) == (0, 0)
    store.close()


def test_of_a_file_that_somebody_made_endless_no_more_is_read_than_shows_it(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 1000)
    store.write(b"k" * 32, [b"abc"])
    os.truncate(files(tmp_path)[0], 2**40)
    assert store.read(b"k" * 32) == b"abc\0"
    store.close()


def test_one_process_at_a_time_stores_in_a_folder(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 1000)
    with pytest.raises(FolderInUseError, match="in use by another process"):
        DiskStore(tmp_path, 1000)
    store.close()
    DiskStore(tmp_path, 1000).close()


def test_a_full_disk_leaves_what_was_there_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path, 1000)
    store.write(key(1), [b"x"])

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk_store.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            store.write(key(2), [b"y"])
    assert store.read(key(1)) == b"x"
    assert store.read(key(2)) is None
    assert len(files(tmp_path)) == 1
    store.close()


def test_a_folder_that_is_a_file_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file"):
        DiskStore(tmp_path / "file", 1000)


def test_a_secret_of_a_wrong_size_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"short")
    store = DiskStore(tmp_path, 1000)
    assert len(store.secret) == 32
    assert (tmp_path / "secret").read_bytes() == store.secret
    store.close()


WRITER = textwrap.dedent("""
    import itertools, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[2])
    import conftest
    from mlxd.caches.disk_store import DiskStore

    store = DiskStore(Path(sys.argv[1]), 10**6)
    print("ready", flush=True)
    for number in itertools.count():
        store.write(number.to_bytes(32, "big"), [number.to_bytes(4, "big") * 25_000])
""")


@pytest.mark.parametrize("seed", range(3))
def test_a_process_killed_while_it_writes_leaves_whole_files_within_the_budget(
    tmp_path: Path, seed: int
) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        while len(list((tmp_path / "pages").glob("*.safetensors"))) < 3 + seed:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    (tmp_path / "pages" / f"{key(10**6).hex()}.tmp").write_bytes(b"half")
    store = DiskStore(tmp_path, 10**6)
    assert len(store) >= 3
    assert [path for path in files(tmp_path) if path.suffix == ".tmp"] == []
    assert store.used_bytes == on_disk(tmp_path) <= 10**6
    for path in files(tmp_path):
        number = int(path.stem, 16)
        assert store.read(key(number)) == number.to_bytes(4, "big") * 25_000
    store.close()
