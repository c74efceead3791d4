"""CURVE keys and their files: a secret half for its owner's eyes, a public half to tell."""

import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import zmq

from mlxd.batching.errors import SettingError
from mlxd.caches.files import open_file
from mlxd.scheduler.config import CurveConfig
from mlxd.scheduler.errors import ConfigError
from mlxd.scheduler.tokens import check_name, write_secret
from mlxd.scheduler.z85 import KEY_LENGTH, is_key

SUBMIT_PORT, CONTROL_PORT = 7000, 7001

_MAX_FILE_BYTES = 256
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Both halves as Z85 text."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def make(cls) -> Self:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    @classmethod
    def of_secret(cls, secret: str) -> Self:
        """Raises ConfigError where `secret` is no key; it is not repeated."""
        if not is_key(secret):
            raise ConfigError(f"the secret key is no key: {KEY_LENGTH} characters of Z85 are expected")
        return cls(zmq.curve_public(secret.encode()).decode(), secret)


def write_keys(folder: Path, name: str, keys: KeyPair) -> tuple[Path, Path]:
    """Make NAME.key, which its owner alone may read, and NAME.pub in `folder`. Returns their paths.

    Raises:
        ConfigError: `name` is no tenant name, there is such a file, or it cannot be made.
    """
    check_name(name)
    secret, public = folder / f"{name}.key", folder / f"{name}.pub"
    write_secret(secret, keys.secret)
    try:
        with public.open("x", encoding="ascii") as file:
            file.write(f"{keys.public}\n")
    except OSError as error:
        secret.unlink()
        raise ConfigError(f"{public}: cannot be made: {error.strerror}") from None
    return secret, public


def read_keys(path: Path) -> KeyPair:
    """Both halves from a NAME.key file.

    Raises:
        ConfigError: it cannot be read, others may read it, or it holds no key.
    """
    try:
        return KeyPair.of_secret(_read_line(path, is_secret=True))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_public_key(path: Path) -> str:
    """What a NAME.pub file holds. Raises ConfigError where it cannot be read or holds no key."""
    try:
        return _read_line(path, is_secret=False)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def tenant_yaml(name: str, keys: KeyPair) -> str:
    """The lines under `tenants:` that make the tenant known."""
    return f'  - name: "{name}"\n    public_key: "{keys.public}"'


def server_yaml(secret: Path) -> str:
    """The lines that open encrypted sockets on all addresses of this machine."""
    return (
        f"server:\n  curve:\n    secret_key_file: {json.dumps(str(secret.resolve()))}\n"
        f"    submit: tcp://0.0.0.0:{SUBMIT_PORT}\n    control: tcp://0.0.0.0:{CONTROL_PORT}"
    )


def server_keys(config: CurveConfig) -> KeyPair:
    """The daemon's own. Raises SettingError where their file is no good."""
    path = config.secret_key_file
    try:
        return KeyPair.of_secret(_read_line(Path(path), is_secret=True))
    except ValueError as error:
        raise SettingError(("server", "curve", "secret_key_file"), f"is {path!r}: {error}") from None


def _read_line(path: Path, *, is_secret: bool) -> str:
    """Raises ValueError; its text follows the file's name."""
    try:
        with open_file(path, _MAX_FILE_BYTES) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            raw = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    if is_secret and mode & _OTHERS:
        raise ValueError(f"has mode {mode:04o}, so others may use the secret key; it must be 0600")
    line = raw.decode("ascii", "replace").strip()
    if not is_key(line):
        raise ValueError(f"holds no key: one line of {KEY_LENGTH} characters of Z85 is expected")
    return line
