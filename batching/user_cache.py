"""The user's cache folder, and writing into it so that nobody ever sees half a file."""

import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxd.batching.errors import ModelError
from mlxd.batching.waiting import wait_for


def user_cache_folder() -> Path:
    """`$MLXD_CACHE`, else the platform's place for caches. It need not exist yet.

    Raises ModelError: `$MLXD_CACHE` is in the home of nobody, or is not set and this user has no home.
    """
    if folder := os.environ.get("MLXD_CACHE"):
        try:
            return Path(folder).expanduser()
        except RuntimeError as error:
            raise ModelError(f"MLXD_CACHE is {folder!r}; there is no such home folder") from error
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if sys.platform != "darwin" and os.path.isabs(
        folder
    ):  # a relative one is to be ignored, says the standard
        return Path(folder) / "mlxd"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise ModelError("this user has no home folder; set HOME or MLXD_CACHE") from error
    return home / "Library" / "Caches" / "mlxd" if sys.platform == "darwin" else home / ".cache" / "mlxd"


@contextmanager
def exclusive_lock(path: Path, while_waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path`, waiting for another process that has it; its folder is made.

    Args:
        while_waiting: called again and again; it may raise to give up.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        wait_for(lambda: fcntl.flock(file, fcntl.LOCK_EX), while_waiting)
        yield


def publish(source: Path, target: Path) -> None:
    """Move a finished file or folder to `target` in one step, its content on the disk first.

    Both lie on one file system; an existing file is replaced, an existing folder is an OSError.
    """
    for path in (*source.rglob("*"), source) if source.is_dir() else (source,):
        _sync(path)
    source.replace(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
