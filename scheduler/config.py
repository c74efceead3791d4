"""The deployment file: one struct a section, defaults here and nowhere else."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mlxd.caches.budget import ALLOWED_BUDGETS, ALLOWED_SIZES, check_budget, parse_size
from mlxd.caches.quantization import Quantization
from mlxd.scheduler.addresses import check_socket_address, split_host_port
from mlxd.scheduler.document import Document, Keys, parse_document, read_text
from mlxd.scheduler.errors import ConfigError

Address = Annotated[str, Meta(min_length=1, max_length=256)]
Name = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z",
        extra={"allowed": "1 to 64 letters, digits, _ . or -, the first a letter or digit"},
    ),
]
Sha256 = Annotated[
    str,
    Meta(
        pattern=r"^[0-9a-f]{64}\Z",
        extra={"allowed": "the quoted 64 hex digits that `mlxd token` prints", "secret": True},
    ),
]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Budget = Annotated[str | int | float, Meta(extra={"allowed": ALLOWED_BUDGETS})]
Size = Annotated[str | int, Meta(extra={"allowed": ALLOWED_SIZES})]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]
Weight = Annotated[float, Meta(ge=1e-6, le=1e6)]
Fraction = Annotated[float, Meta(gt=0, le=1)]


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sockets and their limits. Sizes in bytes."""

    submit: Address = "ipc:///tmp/mlxd.sock"
    control: Address = "ipc:///tmp/mlxd-control.sock"
    metrics: Address = "127.0.0.1:9464"
    max_message_bytes: Annotated[int, Meta(ge=1024, le=2**30)] = 4 * 2**20
    max_clients: Positive = 256
    max_client_buffer_bytes: Annotated[int, Meta(ge=4096, le=2**40)] = 2**20
    heartbeat_ms: Annotated[int, Meta(ge=50, le=60_000)] = 500
    drain_timeout_s: Seconds = 30.0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`path`: a folder, a hub name or a built-in name. `max_model_len`: None takes the model's context."""

    path: Annotated[str, Meta(min_length=1)] = "smollm2-135m-instruct"
    max_model_len: Positive | None = None


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who runs, and how much a step may hold.

    `prefill_ms`: most milliseconds of prefill between two decode steps (one chunk always may run).
    `prefill_chunk`: tokens a chunk, "auto" measures at start which one fits `prefill_ms`.
    `overcommit`: above 1, reservations may exceed the pages there are; rows are then preempted, recomputed.
    `cached_weight`: what a prompt token found in the prefix cache costs, as a part of one that is computed.
    """

    policy: Literal["fcfs", "fair"] = "fair"
    max_rows: Annotated[int, Meta(ge=1, le=1024)] = 32
    max_waiting: Positive = 1024
    prefill_ms: Annotated[float, Meta(ge=1, le=60_000)] = 250.0
    prefill_chunk: Literal["auto"] | Annotated[int, Meta(ge=16, le=65536)] = "auto"
    overcommit: Annotated[float, Meta(ge=1, le=16)] = 1.0
    prompt_weight: Weight = 1.0
    output_weight: Weight = 2.0
    cached_weight: Annotated[float, Meta(ge=0, le=1)] = 0.1


class DiskConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`path`: a folder of this daemon's own, made if it is not there. `max_bytes`: of all files in it."""

    path: Annotated[str, Meta(min_length=1)]
    max_bytes: Size

    @property
    def folder(self) -> Path:
        """Raises ValueError unless `path` is absolute, a home folder filled in; the text follows its name."""
        try:
            folder = Path(self.path).expanduser()
        except RuntimeError as error:
            raise ValueError(f"is {self.path!r}: {error}") from None
        if not folder.is_absolute() or "\0" in self.path:
            raise ValueError(f"is {self.path!r}; it must be an absolute path of a folder")
        return folder

    @property
    def capacity_bytes(self) -> int:
        """Raises ValueError for a bad `max_bytes`; the text follows its name."""
        return parse_size(self.max_bytes)


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`budget`: bytes ("8GiB", 1048576) or a share of the device memory left after weights (0.6).

    `prefix`: keep what ended rows computed for later requests of their tenant.
    `checkpoints`: share of the budget that holds what rows pass by in sliding windows and recurrent states.
    `quantization`: how keys and values are packed; None keeps them as the model computes them.
    `disk`: where kept pages outlive the daemon; None keeps them in memory alone.
    """

    budget: Budget = 0.6
    page_size: Literal["auto", 16, 32, 64, 128, 256] = "auto"
    prefix: bool = True
    checkpoints: Annotated[float, Meta(ge=0, le=0.5)] = 0.1
    quantization: Quantization | None = None
    disk: DiskConfig | None = None

    @property
    def checkpoint_share(self) -> float:
        """`checkpoints`, of which there are none without `prefix`."""
        return self.checkpoints if self.prefix else 0.0


class DecodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`warmup_s`: most seconds spent at start on tracing graphs and timing variants."""

    compile: Literal["auto", "on", "off"] = "auto"
    attention: Literal["auto", "in_place", "gathered"] = "auto"
    warmup_s: Seconds = 20.0


class TenantConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_share`: largest part of the KV budget its rows may reserve together.

    `operator`: its token may also drain the daemon and see every tenant's status.
    """

    name: Name
    token_sha256: Sha256
    weight: Weight = 1.0
    max_running: Positive = 32
    max_waiting: Positive = 256
    kv_share: Fraction = 1.0
    operator: bool = False


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: Literal[1]
    tenants: Annotated[tuple[TenantConfig, ...], Meta(min_length=1, max_length=10_000)]
    server: ServerConfig = ServerConfig()
    model: ModelConfig = ModelConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    cache: CacheConfig = CacheConfig()
    decode: DecodeConfig = DecodeConfig()

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


def _problems(config: Config) -> Iterator[tuple[Keys, str]]:
    """What is wrong beyond the types of single fields: a value's path and the sentence that follows it."""
    yield from _address_problems(config.server)
    try:
        check_budget(config.cache.budget)
    except ValueError as error:
        yield ("cache", "budget"), str(error)
    yield from _disk_problems(config.cache)
    chunk, page = config.scheduler.prefill_chunk, config.cache.page_size
    if chunk != "auto" and page != "auto" and chunk % page:
        yield (
            ("scheduler", "prefill_chunk"),
            f"is {chunk}; it must be a multiple of cache.page_size, {page}",
        )
    if config.cache.quantization is not None and config.decode.attention == "gathered":
        yield (
            ("decode", "attention"),
            "is 'gathered'; with cache.quantization pages are read in_place",
        )
    yield from _tenant_problems(config.tenants)


def _disk_problems(cache: CacheConfig) -> Iterator[tuple[Keys, str]]:
    if cache.disk is None:
        return
    if not cache.prefix:
        yield ("cache", "disk"), "needs cache.prefix: true"
    try:
        _ = cache.disk.folder
    except ValueError as error:
        yield ("cache", "disk", "path"), str(error)
    try:
        _ = cache.disk.capacity_bytes
    except ValueError as error:
        yield ("cache", "disk", "max_bytes"), str(error)


def _address_problems(server: ServerConfig) -> Iterator[tuple[Keys, str]]:
    for name, address in (("submit", server.submit), ("control", server.control)):
        try:
            check_socket_address(address)
        except ValueError as error:
            yield ("server", name), str(error)
    try:
        split_host_port(server.metrics)
    except ValueError as error:
        yield ("server", "metrics"), str(error)
    if server.control == server.submit:
        yield ("server", "control"), f"is {server.control!r}; it must differ from server.submit"
    for name, address in (("submit", server.submit), ("control", server.control)):
        if address.removeprefix("tcp://") == server.metrics:
            yield ("server", "metrics"), f"is {server.metrics!r}; server.{name} has that port"


def _tenant_problems(tenants: tuple[TenantConfig, ...]) -> Iterator[tuple[Keys, str]]:
    names: dict[str, int] = {}
    hashes: dict[str, int] = {}
    for index, tenant in enumerate(tenants):
        first = names.setdefault(tenant.name, index)
        if first != index:
            yield ("tenants", index, "name"), f"is {tenant.name!r}; tenants[{first}] has that name"
        first = hashes.setdefault(tenant.token_sha256, index)
        if first != index:
            yield ("tenants", index, "token_sha256"), f"is that of tenants[{first}]; tokens must differ"
