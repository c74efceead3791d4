"""Configurations as text, and the one line that is said of a wrong one."""

import pytest

from mlxd.scheduler.config import Config
from mlxd.scheduler.errors import ConfigError

HASH = "0" * 64
TENANTS = f'tenants:\n  - {{name: acme, token_sha256: "{HASH}"}}\n'
MINIMAL = f"version: 1\n{TENANTS}"


def error_of(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.parse(text, "x.yaml")
    message = str(caught.value)
    assert "\n" not in message
    return message


def with_section(section: str) -> str:
    """A configuration that is right but for `section`, which begins on its line 4."""
    return f"{MINIMAL}{section}"
