"""How many files the process may have open: every connection is one."""

import resource
from contextlib import suppress

from mlxd.scheduler.errors import ConfigError

_AMPLE = 65_536
_MOST_ON_MACOS = 10_240
_OTHERS = 512
"""Model files, libraries, HTTP connections, and strangers that libzmq took before it was told to let go."""


def allow_open_files() -> int:
    """Raise the limit as far as this process may, up to what is ample; the limit it has then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _AMPLE if hard == resource.RLIM_INFINITY else min(hard, _AMPLE)
    for wanted in (most, min(most, _MOST_ON_MACOS)):
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            return most if soft == resource.RLIM_INFINITY else soft
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return soft


def check_open_files(max_clients: int, max_strangers: int, limit: int, num_sockets: int = 2) -> None:
    """Raises ConfigError where sockets full of clients and strangers need more than `limit` files."""
    needed = num_sockets * (max_clients + max_strangers) + _OTHERS
    if needed > limit:
        most = (limit - _OTHERS) // num_sockets - max_strangers
        raise ConfigError(
            f"server.max_clients is {max_clients}, which takes {needed} open files; the limit (ulimit -n) is "
            f"{limit}, enough for {max(0, most)} clients"
        )
