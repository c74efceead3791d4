"""The files of ipc:// sockets: whose they are, and who may open them."""

import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event

from mlxd.scheduler.errors import ConfigError

BACKLOG = 128
TURN_TRIES = 60
TURN_TRY_S = 0.05


def claim(path: Path) -> None:
    """Make way for a new socket at `path`: what a dead daemon left there is removed.

    Raises:
        ConfigError: a live process listens there, it is no socket, or its folder cannot be used.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise ConfigError(f"ipc://{path}: the folder {path.parent} does not exist") from None
        return
    except OSError as error:
        raise ConfigError(f"ipc://{path}: {error.strerror}") from None
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"ipc://{path}: a file that is not a socket is in the way")
    if _is_live(path):
        raise ConfigError(f"ipc://{path}: another daemon is listening there")
    path.unlink(missing_ok=True)


def _is_live(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


class SocketFile:
    """A listening Unix socket at a path, readable and writable by its owner alone.

    libzmq is given `listener` and leaves the file to us: it would remove whoever's file is there by then.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError: the path is taken, or cannot be used."""
        self._path = path
        with _turn_in(path.parent):
            claim(path)
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                with _owner_only():
                    self.listener.bind(str(path))
                self.listener.listen(BACKLOG)
                self.listener.setblocking(False)
                self._identity = _identity(path)
            except OSError as error:
                self.listener.close()
                raise ConfigError(f"ipc://{path}: {error.strerror}") from None

    def remove(self) -> None:
        """Remove the file, unless another daemon put its own there."""
        with suppress(FileNotFoundError):
            if _identity(self._path) == self._identity:
                self._path.unlink()


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


@contextmanager
def _turn_in(folder: Path) -> Iterator[None]:
    """One daemon at a time: of two that find a dead one's file, the later would remove the earlier's own.

    Anybody who reads the folder may lock it, so nobody is waited for beyond a time.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # it is no folder, as `claim` says, or one that may be used and not read
        yield
        return
    try:
        for _ in range(TURN_TRIES):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                Event().wait(TURN_TRY_S)
            else:
                break
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _owner_only() -> Iterator[None]:
    """Files made inside are readable and writable by their owner alone."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)
