"""A tenant's token: made here once, kept by the tenant, known to the daemon by its hash alone."""

import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mlxd.caches.files import read_file
from mlxd.scheduler.errors import ConfigError
from mlxd.scheduler.schema import describe
from mlxd.scheduler.sections import Name

MAX_FILE_BYTES = 4096


def token_hash(token: str) -> str:
    """What `token_sha256` holds for it."""
    return hashlib.sha256(token.encode()).hexdigest()


def check_name(name: str) -> None:
    """Raises ConfigError where `name` is no tenant name."""
    try:
        msgspec.convert(name, Name)
    except msgspec.ValidationError:
        allowed = describe(msgspec.inspect.type_info(Name))
        raise ConfigError(f"the tenant's name is {name!r}; it must be {allowed}") from None


@dataclass(frozen=True, slots=True)
class NewToken:
    """A tenant's secret, and the lines under `tenants:` that make the tenant known."""

    token: str
    yaml: str


def make_token(name: str) -> NewToken:
    """A fresh token of 256 random bits for tenant `name`.

    Raises:
        ConfigError: `name` is no tenant name.
    """
    check_name(name)
    token = secrets.token_urlsafe(32)
    return NewToken(token, f'  - name: "{name}"\n    token_sha256: "{token_hash(token)}"')


def write_secret(path: Path, secret: str) -> None:
    """Make a file of one line that its owner alone may read.

    Raises:
        ConfigError: there is such a file, or it cannot be made.
    """
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(f"{secret}\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be made: {error.strerror}") from None


def read_token(token: str | None, path: Path | None) -> str:
    """The token as given, or from a file that holds nothing else.

    Raises:
        ConfigError: neither is given, or the file cannot be read or is no token.
    """
    if path is None:
        if not token:
            raise ConfigError(
                "no token: give --token, --tenant-key FILE or MLXD_TOKEN; with CURVE --key and --server-key"
            )
        return token
    try:
        text = read_file(path, MAX_FILE_BYTES).decode("ascii").strip()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        text = ""
    if not text.isprintable() or not text or " " in text:
        raise ConfigError(f"{path}: holds no token: one line of printable ASCII is expected")
    return text
