"""Files: read within a bound and never waited for, written whole or not at all."""

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO


def open_file(path: str | Path, max_bytes: int) -> BinaryIO:
    """A regular file, open for reading.

    Raises:
        OSError: it cannot be opened, is a folder, a pipe or a device, or has more than `max_bytes` bytes;
            `strerror` says which.
    """
    try:
        # Without O_NONBLOCK a pipe that nobody writes to would be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # a null byte
        raise OSError(errno.EINVAL, str(error)) from None
    try:
        _check(os.fstat(descriptor), max_bytes)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check(status: os.stat_result, max_bytes: int) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")
    if status.st_size > max_bytes:
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it has more than {max_bytes} bytes, the limit")


def read_file(path: str | Path, max_bytes: int) -> bytes:
    """All of a regular file. Raises OSError as `open_file` does."""
    with open_file(path, max_bytes) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:  # it grew
        raise _too_large(max_bytes)
    return content


def write_synced(path: Path, parts: Sequence[bytes]) -> None:
    """Write a file that its owner alone may use; blocks until it is on disk. Raises OSError."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """As `write_synced`, but at every moment what was there before, or this, is there whole."""
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    write_synced(temporary, [content])
    os.replace(temporary, path)
