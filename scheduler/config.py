"""The deployment file: one struct a section, defaults here and nowhere else."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Port = Annotated[str, Meta(min_length=1, max_length=256)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
Positive = Annotated[int, Meta(ge=1)]
Fraction = Annotated[float, Meta(gt=0, le=1)]


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sockets and their limits. Sizes in bytes."""

    submit: Port = "ipc:///tmp/mlxd.sock"
    control: Port = "ipc:///tmp/mlxd-control.sock"
    metrics: Port = "127.0.0.1:9464"
    max_message_bytes: Annotated[int, Meta(ge=1024, le=2**30)] = 4 * 2**20
    max_clients: Positive = 256
    max_client_buffer_bytes: Annotated[int, Meta(ge=4096)] = 2**20
    heartbeat_ms: Annotated[int, Meta(ge=50, le=60_000)] = 500
    drain_timeout_s: Annotated[float, Meta(ge=0)] = 30.0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`path`: a folder, a hub name, or a built-in name. `max_model_len`: None takes the model's own context."""

    path: Annotated[str, Meta(min_length=1)] = "smollm2-135m-instruct"
    max_model_len: Positive | None = None


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who runs, and how much a step may hold.

    `prefill_ms`: most milliseconds of prefill between two decode steps (one chunk always may run).
    `prefill_chunk`: tokens a chunk, "auto" measures at start which one fits `prefill_ms`.
    `overcommit`: above 1, reservations may exceed the pages there are; rows are then preempted and recomputed.
    """

    policy: Literal["fcfs", "fair"] = "fair"
    max_rows: Annotated[int, Meta(ge=1, le=1024)] = 32
    max_waiting: Positive = 1024
    prefill_ms: Annotated[float, Meta(ge=1)] = 250.0
    prefill_chunk: Literal["auto"] | Annotated[int, Meta(ge=16, le=65536)] = "auto"
    overcommit: Annotated[float, Meta(ge=1, le=16)] = 1.0
    prompt_weight: Annotated[float, Meta(gt=0)] = 1.0
    output_weight: Annotated[float, Meta(gt=0)] = 2.0


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`budget`: bytes ("8GiB", 1048576) or a share of the device memory left after weights (0.6)."""

    budget: str | int | float = 0.6
    page_size: Literal["auto", 16, 32, 64, 128, 256] = "auto"


class DecodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`warmup_s`: most seconds spent at start on tracing graphs and timing variants."""

    compile: Literal["auto", "on", "off"] = "auto"
    attention: Literal["auto", "in_place", "gathered"] = "auto"
    warmup_s: Annotated[float, Meta(ge=0)] = 60.0


class TenantConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_share`: largest part of the KV budget its rows may reserve together."""

    name: Name
    token_sha256: Sha256
    weight: Annotated[float, Meta(gt=0, le=1_000_000)] = 1.0
    max_running: Positive = 32
    max_waiting: Positive = 256
    kv_share: Fraction = 1.0


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: Literal[1]
    tenants: Annotated[tuple[TenantConfig, ...], Meta(min_length=1, max_length=10_000)]
    server: ServerConfig = ServerConfig()
    model: ModelConfig = ModelConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    cache: CacheConfig = CacheConfig()
    decode: DecodeConfig = DecodeConfig()
