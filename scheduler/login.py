"""What a client shows the daemon: a token on this machine, CURVE keys anywhere."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from mlxd.scheduler.addresses import is_loopback, split_host_port
from mlxd.scheduler.errors import ConfigError
from mlxd.scheduler.keys import KeyPair, read_keys, read_public_key
from mlxd.scheduler.z85 import is_key


@dataclass(frozen=True, slots=True)
class Login:
    """`keys`: the client's own, None with a token; `server_key`: the daemon's public one."""

    token: str = field(default="", repr=False)
    keys: KeyPair | None = None
    server_key: str = ""

    @classmethod
    def of(cls, token: str | None, key: str | Path | None, server_key: str | Path | None) -> Self:
        """From a token, or from both keys; each key as Z85 text or as a file's path.

        Raises:
            ConfigError: it is neither, or a key or its file is no good.
        """
        if key is None and server_key is None:
            if token is None:
                raise ConfigError("no credential: give a token, or a key and the server's key")
            return cls(token)
        if key is None or server_key is None:
            given, missing = ("key", "server's key") if server_key is None else ("server's key", "key")
            raise ConfigError(f"the {given} is given and the {missing} is missing")
        if token is not None:
            raise ConfigError("a token and a key are given; one says who you are")
        keys = read_keys(key) if isinstance(key, Path) else KeyPair.of_secret(key)
        known = read_public_key(server_key) if isinstance(server_key, Path) else server_key
        if not is_key(known):
            raise ConfigError(f"the server's key is {known!r}: that is no key")
        return cls(keys=keys, server_key=known)

    def check_endpoint(self, endpoint: str) -> None:
        """Raises ConfigError where it is no text, has no scheme, takes no keys, or a token could be read."""
        if not endpoint.isprintable():
            raise ConfigError(f"endpoint {endpoint!r} has unprintable characters")
        if "://" not in endpoint:
            scheme = "ipc" if endpoint.startswith("/") else "tcp"
            raise ConfigError(f"endpoint {endpoint!r} has no scheme; write {scheme}://{endpoint}")
        if self.keys is not None and not endpoint.startswith("tcp://"):
            raise ConfigError(f"endpoint {endpoint!r}: keys are for tcp:// endpoints")
        if self.keys is None and endpoint.startswith("tcp://") and not _is_local(endpoint):
            raise ConfigError(f"endpoint {endpoint!r}: beyond this machine a token could be read; use keys")


def _is_local(endpoint: str) -> bool:
    """What is no address of ours at all is for ZeroMQ to refuse."""
    try:
        host, _ = split_host_port(endpoint.removeprefix("tcp://"))
    except ValueError:
        return True
    return is_loopback(host)
