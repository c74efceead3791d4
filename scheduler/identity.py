"""As whom the command line speaks: by its options, or by the environment where they leave it open."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

from mlxd.scheduler.errors import ConfigError
from mlxd.scheduler.login import Login
from mlxd.scheduler.tokens import read_token

_VARIABLES = ("MLXD_TOKEN", "MLXD_KEY", "MLXD_SERVER_KEY")
_PAIRS = (("--key", "--server-key"), ("MLXD_KEY", "MLXD_SERVER_KEY"))


def identify(
    token: str | None,
    tenant_key: Path | None,
    key: Path | None,
    server_key: Path | None,
    environment: Mapping[str, str],
) -> Login:
    """The login that options give; any of them beats what the environment says of another kind.

    Raises:
        ConfigError: there is no credential, there are two in one place, or a file is no good.
    """
    options = {"--token": token, "--tenant-key": tenant_key, "--key": key, "--server-key": server_key}
    given = [name for name, value in options.items() if value is not None]
    _check_one(given)
    if not given:
        _check_one([name for name in _VARIABLES if environment.get(name)])
        token = environment.get("MLXD_TOKEN") or None
    if token is None and tenant_key is None:
        key = key or _path(environment, "MLXD_KEY")
        server_key = server_key or _path(environment, "MLXD_SERVER_KEY")
    if key is None and server_key is None:
        token = read_token(token, tenant_key)
    return Login.of(token, key, server_key)


def _check_one(given: Sequence[str]) -> None:
    """Raises ConfigError where two of these, all of one place, say who it is."""
    for pair in combinations(given, 2):
        if pair not in _PAIRS:
            raise ConfigError(f"{pair[0]} and {pair[1]} are both given; one says who you are")


def _path(environment: Mapping[str, str], name: str) -> Path | None:
    value = environment.get(name)
    return Path(value) if value else None
