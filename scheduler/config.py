"""The deployment file: its sections, read and checked."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mlxd.scheduler import config_rules as rules
from mlxd.scheduler.document import Document, Keys, parse_document, read_text
from mlxd.scheduler.errors import ConfigError
from mlxd.scheduler.sections import (
    CacheConfig,
    CurveConfig,
    DecodeConfig,
    DiskConfig,
    JournalConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    TenantConfig,
    TenantLimits,
)

__all__ = [
    "CacheConfig",
    "Config",
    "CurveConfig",
    "DecodeConfig",
    "DiskConfig",
    "JournalConfig",
    "ModelConfig",
    "SchedulerConfig",
    "ServerConfig",
    "TenantConfig",
    "TenantLimits",
]


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: Literal[1]
    tenants: Annotated[tuple[TenantConfig, ...], Meta(min_length=1, max_length=10_000)]
    server: ServerConfig = ServerConfig()
    model: ModelConfig = ModelConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    cache: CacheConfig = CacheConfig()
    decode: DecodeConfig = DecodeConfig()
    journal: JournalConfig = JournalConfig()

    @property
    def resume_grace_s(self) -> float:
        if self.server.resume_grace_s is not None:
            return self.server.resume_grace_s
        return self.server.retention_s if self.journal.durability == "accepted" else 0.0

    @classmethod
    def load(cls, path: str | Path) -> "Config":
        """Read a YAML file. Raises ConfigError, one line, for the first thing that is wrong with it."""
        return cls.parse(read_text(path), str(path))

    @classmethod
    def parse(cls, text: str, where: str = "config") -> "Config":
        """Read YAML text; `where` names it in errors. Raises ConfigError."""
        return _convert(parse_document(text, where))

    @staticmethod
    def locate(path: str | Path, keys: Keys, sentence: str) -> ConfigError:
        """The error of a value in this file that is found wrong later; `sentence` follows its name."""
        return parse_document(read_text(path), str(path)).error(keys, sentence)

    def check(self) -> None:
        """Apply to a configuration made in Python what `parse` applies to a text. Raises ConfigError."""
        _convert(Document("config", msgspec.to_builtins(self), {}))


def _convert(document: Document) -> Config:
    config = document.convert(Config)
    for keys, sentence in _problems(config):
        raise document.error(keys, sentence)
    return config


def _problems(config: Config) -> Iterator[rules.Problem]:
    curve, disk = config.server.curve, config.cache.disk
    yield from rules.path_problems(
        {
            ("server", "submit"): config.server.submit,
            ("server", "control"): config.server.control,
            ("server", "curve", "secret_key_file"): curve.secret_key_file if curve else None,
            ("model", "path"): config.model.path,
            ("cache", "disk", "path"): disk.path if disk else None,
            ("journal", "path"): config.journal.path,
        }
    )
    yield from rules.address_problems(config.server)
    yield from rules.cache_problems(config.cache)
    yield from rules.journal_problems(config.journal)
    yield from rules.chunk_problems(config.scheduler.prefill_chunk, config.cache.page_size)
    yield from rules.attention_problems(config.cache.quantization, config.decode.attention)
    yield from rules.tenant_problems(config.tenants, has_curve=config.server.curve is not None)
