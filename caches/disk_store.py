"""Files by key in one folder that outlives the process, within a budget."""

import fcntl
import os
import secrets
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from stat import S_ISREG
from threading import Lock

from mlxd.caches.files import open_file

_SECRET_BYTES = 32
_PAGES = "pages"
_SUFFIX = ".safetensors"
_TEMPORARY = ".tmp"


class FolderInUseError(OSError):
    """Another process stores in the folder."""


class DiskStore:
    """At most `max_bytes` of files, the least recently used given up first; any thread may call.

    A file appears whole or not at all: it is written beside its place, synced and renamed. What a killed
    process left half-written is removed at the next start. Its time of change tells when a file was used.

    Attributes:
        secret: random, made with the folder; readable by its owner alone.
        num_evicted: files given up for others since the start.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Makes the folder where it is not there.

        Raises:
            OSError: it cannot be read and written, or is in use by another process (FolderInUseError).
        """
        self.max_bytes = max_bytes
        self.num_evicted = 0
        self._pages = folder / _PAGES
        self._pages.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._mutex = Lock()
        self._lock_file = _lock(folder / "lock")
        try:
            self.secret = _secret(folder / "secret")
            self._sizes = self._scan()
            self._used_bytes = sum(self._sizes.values())
            self._make_room(0)
        except OSError:
            self.close()
            raise

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def read(self, key: bytes) -> bytes | None:
        """A file's bytes, and one more where it grew since; None where there is none.

        One that cannot be read is gone.
        """
        size = self._sizes.get(key)
        if size is None:
            return None
        try:
            with self._path(key).open("rb") as file:
                return file.read(size + 1)
        except OSError:
            self.remove(key)
            return None

    def touch(self, key: bytes) -> None:
        """It is the most recently used from now on."""
        with self._mutex:
            if key in self._sizes:
                self._sizes.move_to_end(key)
                try:
                    os.utime(self._path(key))
                except OSError:
                    self._forget(key)
                    _unlink(self._path(key))

    def write(self, key: bytes, parts: Sequence[bytes]) -> bool:
        """Store `parts`, one after the other, and give up other files for them; blocks until it is on disk.

        Returns:
            False: they are larger than the whole budget.
        Raises:
            OSError: the disk is full or fails; nothing of them is left, what was there is as it was.
        """
        size = sum(map(len, parts))
        if size > self.max_bytes:
            return False
        self.remove(key)
        with self._mutex:
            self._make_room(size)
        path = self._path(key)
        temporary = path.with_suffix(_TEMPORARY)
        try:
            _write_synced(temporary, parts)
            with self._mutex:
                os.replace(temporary, path)
                self._sizes[key] = size
                self._used_bytes += size
        except OSError:
            _unlink(temporary)
            raise
        return True

    def remove(self, key: bytes) -> None:
        with self._mutex:
            if key in self._sizes:
                self._forget(key)
                _unlink(self._path(key))

    def close(self) -> None:
        """Let another process use the folder; may be called again."""
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1

    def _path(self, key: bytes) -> Path:
        return self._pages / (key.hex() + _SUFFIX)

    def _scan(self) -> OrderedDict[bytes, int]:
        found: list[tuple[int, bytes, int]] = []
        for path in self._pages.iterdir():
            status = path.lstat()
            if not S_ISREG(status.st_mode):
                continue
            key = _key_of(path)
            if key is not None:
                found.append((status.st_mtime_ns, key, status.st_size))
            elif path.suffix == _TEMPORARY:
                path.unlink()
        return OrderedDict((key, size) for _, key, size in sorted(found))

    def _make_room(self, size: int) -> None:
        while self._sizes and self._used_bytes + size > self.max_bytes:
            key = next(iter(self._sizes))
            self._path(key).unlink(missing_ok=True)
            self._forget(key)
            self.num_evicted += 1

    def _forget(self, key: bytes) -> None:
        self._used_bytes -= self._sizes.pop(key)


def stored_in(folder: Path) -> tuple[int, int]:
    """Files and bytes that a folder's store has, in use or not; (0, 0) where there is none.

    Raises:
        OSError: it cannot be read.
    """
    pages = folder / _PAGES
    paths = [path for path in pages.iterdir() if _key_of(path)] if pages.is_dir() else []
    return len(paths), sum(path.stat().st_size for path in paths)


def _key_of(path: Path) -> bytes | None:
    """The key in a file's name; None where it is no file of ours."""
    if path.suffix != _SUFFIX:
        return None
    try:
        key = bytes.fromhex(path.stem)
    except ValueError:
        return None
    return key if key.hex() == path.stem else None


def _lock(path: Path) -> int:
    """An open file that is locked until it is closed or the process ends."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise FolderInUseError(f"{path.parent} is in use by another process") from None
    except OSError:
        os.close(file)
        raise
    return file


def _secret(path: Path) -> bytes:
    """Read or make the secret; one of a wrong size is replaced, which makes all files foreign."""
    if path.exists():
        with open_file(path, sys.maxsize) as file:
            secret = file.read(_SECRET_BYTES + 1)
        if len(secret) == _SECRET_BYTES:
            return secret
    secret = secrets.token_bytes(_SECRET_BYTES)
    temporary = path.with_suffix(_TEMPORARY)
    _unlink(temporary)
    _write_synced(temporary, [secret])
    os.replace(temporary, path)
    return secret


def _write_synced(path: Path, parts: Sequence[bytes]) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # the disk fails: there is nothing more to do for it
