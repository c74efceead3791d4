"""A changed configuration file takes effect while the daemon runs, whole or not at all."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from mlxd.batching.errors import SettingError
from mlxd.scheduler.config import Config, TenantConfig
from mlxd.scheduler.document import Keys
from mlxd.scheduler.engine import Engine
from mlxd.scheduler.errors import ConfigError
from mlxd.scheduler.fit import check_shares

logger = logging.getLogger(__name__)

_CREDENTIALS = {"token_sha256": "token_hashes", "public_key": "public_keys"}
"""Settings that are not shown, and the properties that have their values as tuples."""


class Reloader:
    """Runs on the asyncio thread. Tenants change; whatever else differs needs a restart.

    Args:
        config: what is in effect.
        path: its file; None where it has none.
        apply: puts a configuration into effect that is right; it does not fail.
    """

    def __init__(
        self, config: Config, path: Path | None, engine: Engine, apply: Callable[[Config], None]
    ) -> None:
        self._config = config
        self._path = path
        self._engine = engine
        self._apply = apply
        self._turn = asyncio.Lock()

    async def reload(self) -> tuple[str, ...]:
        """Read the file anew. Returns what changed, a line each, without secrets.

        Raises:
            ConfigError: nothing changed; the message says where the file is wrong or what needs a restart.
        """
        async with self._turn:
            try:
                config = await self._read()
            except ConfigError as error:
                logger.error("reload refused: %s", error)
                raise
            changes = tuple(tenant_changes(self._config.tenants, config.tenants))
            self._config = config
            self._apply(config)
            logger.info("reloaded tenants=%d changes=%d", len(config.tenants), len(changes))
            for change in changes:
                logger.info("reloaded %s", change)
            return changes

    async def _read(self) -> Config:
        if self._path is None:
            raise ConfigError("this daemon was started without a configuration file")
        if self._engine.snapshot.state != "running":
            raise ConfigError(f"the daemon is {self._engine.snapshot.state}; tenants change while it runs")
        config = await asyncio.to_thread(Config.load, self._path)
        try:
            _check_live(self._config, config)
            check_shares(config, self._engine.info.memory)
        except SettingError as error:
            raise Config.locate(self._path, error.keys, error.sentence) from None
        return config


def _check_live(old: Config, new: Config) -> None:
    """Raises SettingError for a difference that needs a restart."""
    for section in Config.__struct_fields__:
        if section == "tenants":
            continue
        keys = _first_difference((section,), getattr(old, section), getattr(new, section))
        if keys is not None:
            raise SettingError(keys, "changed; that takes effect with a restart alone")


def _first_difference(keys: Keys, old: object, new: object) -> Keys | None:
    if old == new:
        return None
    if isinstance(old, msgspec.Struct) and isinstance(new, msgspec.Struct):
        for name in old.__struct_fields__:
            found = _first_difference((*keys, name), getattr(old, name), getattr(new, name))
            if found is not None:
                return found
    return keys


def tenant_changes(old: tuple[TenantConfig, ...], new: tuple[TenantConfig, ...]) -> Iterator[str]:
    """One line a tenant that was added, removed or changed; credentials are not shown."""
    before, after = ({tenant.name: tenant for tenant in tenants} for tenants in (old, new))
    for name in before.keys() - after.keys():
        yield f"{name}: removed"
    for name, tenant in after.items():
        if name not in before:
            yield f"{name}: added"
        elif changes := ", ".join(_field_changes(before[name], tenant)):
            yield f"{name}: {changes}"


def _field_changes(old: TenantConfig, new: TenantConfig) -> Iterator[str]:
    for name in TenantConfig.__struct_fields__:
        was, is_now = (getattr(tenant, _CREDENTIALS.get(name, name)) for tenant in (old, new))
        if name in _CREDENTIALS:
            was, is_now = set(was), set(is_now)
            if was != is_now:
                yield f"{name} {_replacement(was, is_now)}"
        elif was != is_now:
            yield f"{name} {was} -> {is_now}"


def _replacement(was: set[str], is_now: set[str]) -> str:
    """What became of credentials that differ."""
    if was <= is_now:
        return "added"
    return "removed" if is_now <= was else "replaced"
