"""Which socket addresses the daemon accepts: Unix sockets and loopback TCP; where it encrypts, any TCP."""

import ipaddress
import os
import re
import sys

MAX_IPC_PATH_BYTES = 103 if sys.platform == "darwin" else 107
"""What `sockaddr_un.sun_path` holds, less its final NUL."""

_HOST_PORT = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9.-]+)):(?P<port>[0-9]{1,5})")


def check_socket_address(address: str, *, encrypted: bool = False) -> None:
    """Raises ValueError unless `address` may be bound; the text follows the setting's name.

    `encrypted`: whether the socket speaks CURVE.
    """
    scheme, _, rest = address.partition("://")
    if encrypted and scheme != "tcp":
        raise ValueError(f"is {address!r}; it must be tcp://HOST:PORT")
    if scheme == "ipc":
        _check_ipc_path(address, rest)
    elif scheme == "tcp":
        try:
            host, port = split_host_port(rest)
        except ValueError:
            raise ValueError(f"is {address!r}; it must be tcp://HOST:PORT with a port to 65535") from None
        if not (encrypted or is_loopback(host)):
            raise ValueError(f"is {address!r}; beyond loopback there are only the sockets of server.curve")
        if port == 0:
            raise ValueError(f"is {address!r}; its port must be from 1 to 65535")
    else:
        raise ValueError(f"is {address!r}; it must be ipc:///PATH or tcp://127.0.0.1:PORT")


def split_host_port(text: str) -> tuple[str, int]:
    """The parts of "host:port" or "[v6]:port", port 0 to 65535.

    Raises:
        ValueError: its text follows the setting's name.
    """
    match = _HOST_PORT.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise ValueError(f"is {text!r}; it must be HOST:PORT with a port from 0 to 65535")
    return match["v6"] or match["host"], int(match["port"])


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def seen_from(endpoint: str, address: str) -> str:
    """`address` as who reached `endpoint` reaches it: a socket bound to all addresses names none."""
    try:
        host, port = split_host_port(address.removeprefix("tcp://"))
        if not ipaddress.ip_address(host).is_unspecified:
            return address
    except ValueError:
        return address
    return f"{endpoint.rpartition(':')[0]}:{port}"


def _check_ipc_path(address: str, path: str) -> None:
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise ValueError(f"is {address!r}; its path must be absolute and name a file")
    size = len(os.fsencode(path))
    if size > MAX_IPC_PATH_BYTES:
        raise ValueError(
            f"is {address!r}; its path has {size} bytes, a socket's path has at most {MAX_IPC_PATH_BYTES}"
        )
