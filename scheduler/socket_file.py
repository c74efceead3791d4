"""The files of ipc:// sockets: whose they are, and who may open them."""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxd.scheduler.errors import ConfigError


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


@contextmanager
def owner_only() -> Iterator[None]:
    """Files made inside are readable and writable by their owner alone."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)
