"""The standard streams of the command, as whoever started it left them: closed, full, of any encoding."""

import io
import os
import sys


def open_standard_streams() -> None:
    """Make all three usable; to be called before anything else is opened.

    One that is closed becomes the null device: else a socket or a file would get its number, and whatever a
    library prints. On stdout a character that its encoding lacks is printed as its escape, as on stderr.
    """
    for number in range(3):
        _open(number)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _open(number: int) -> None:
    try:
        os.fstat(number)
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        assert null == number
        os.set_inheritable(number, True)


def flush_or_drop_stdout() -> None:
    """What cannot be printed is dropped: Python would try once more at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
