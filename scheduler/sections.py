"""The sections of the deployment file: one struct each, defaults here and nowhere else."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mlxd.caches.budget import ALLOWED_BUDGETS, ALLOWED_SIZES, parse_size
from mlxd.caches.quantization import Quantization
from mlxd.scheduler.priority import PriorityName
from mlxd.scheduler.z85 import KEY_LENGTH

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
PublicKey = Annotated[
    str,
    Meta(
        min_length=KEY_LENGTH,
        max_length=KEY_LENGTH,
        extra={"allowed": f"the quoted {KEY_LENGTH} characters that `mlxd keys new` prints"},
    ),
]
MAX_CREDENTIALS = 8
Several = Meta(min_length=1, max_length=MAX_CREDENTIALS)
PolicyName = Literal["fcfs", "fair"]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Budget = Annotated[str | int | float, Meta(extra={"allowed": ALLOWED_BUDGETS})]
Size = Annotated[str | int, Meta(extra={"allowed": ALLOWED_SIZES})]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]
Cost = Annotated[float, Meta(ge=1e-6, le=1e6)]
Weight = Annotated[float, Meta(ge=1e-3, le=1e3)]
"""So near that a token of the heaviest tenant still moves a counter as large as the lightest one's."""
Fraction = Annotated[float, Meta(gt=0, le=1)]


class CurveConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two more sockets, encrypted, for clients with keys. `secret_key_file`: of `mlxd keys new --server`."""

    secret_key_file: Annotated[str, Meta(min_length=1)]
    submit: Address
    control: Address


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sockets and their limits. Sizes in bytes. `curve`: None serves this machine alone.

    `max_client_buffer_bytes`: unread output; with more than half of it a request is paused.
    `retention_s`, `retention_bytes`: how long ended requests can be told again, and how much of them is kept;
    the same of paused ones that are not read.
    `resume_grace_s`: how long a request goes on without its client; None: `retention_s` where accepted
    requests are durable, else 0.
    """

    submit: Address = "ipc:///tmp/mlxd.sock"
    control: Address = "ipc:///tmp/mlxd-control.sock"
    metrics: Address = "127.0.0.1:9464"
    max_message_bytes: Annotated[int, Meta(ge=1024, le=2**30)] = 4 * 2**20
    max_clients: Positive = 256
    max_client_buffer_bytes: Annotated[int, Meta(ge=4096, le=2**40)] = 2**20
    heartbeat_ms: Annotated[int, Meta(ge=50, le=60_000)] = 500
    drain_timeout_s: Seconds = 30.0
    retention_s: Annotated[float, Meta(ge=1, le=604_800)] = 600.0
    retention_bytes: Annotated[int, Meta(ge=4096, le=2**40)] = 64 * 2**20
    resume_grace_s: Seconds | None = None
    curve: CurveConfig | None = None


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
    `ageing_s`: a class that got no row for so long, while higher ones wait, gets a turn: in each tenant.
    `slice_tokens`: tokens after which a row may make way for a tenant that is behind; None: never.
    `max_preemptions`: of one request, for a class or a tenant; lack of pages may add more.
    `backfill_s`: how long others may enter before a request that was next and waits for pages.
    `step_timeout_s`: a step that takes longer hangs: open requests end and the process exits.
    """

    policy: PolicyName = "fair"
    max_rows: Annotated[int, Meta(ge=1, le=1024)] = 32
    max_waiting: Positive = 1024
    prefill_ms: Annotated[float, Meta(ge=1, le=60_000)] = 250.0
    prefill_chunk: Literal["auto"] | Annotated[int, Meta(ge=16, le=65536)] = "auto"
    overcommit: Annotated[float, Meta(ge=1, le=16)] = 1.0
    prompt_weight: Cost = 1.0
    output_weight: Cost = 2.0
    cached_weight: Annotated[float, Meta(ge=0, le=1)] = 0.1
    ageing_s: Annotated[float, Meta(gt=0, le=86_400)] = 30.0
    slice_tokens: Positive | None = 256
    max_preemptions: Annotated[int, Meta(ge=0, le=1000)] = 3
    backfill_s: Seconds = 10.0
    step_timeout_s: Annotated[float, Meta(ge=1, le=86_400)] = 120.0


class DiskConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`path`: a folder of this daemon's own, made if it is not there. `max_bytes`: of all files in it."""

    path: Annotated[str, Meta(min_length=1)]
    max_bytes: Size

    @property
    def folder(self) -> Path:
        """Raises ValueError unless `path` is absolute, a home folder filled in; the text follows its name."""
        try:
            folder = Path(self.path).expanduser()
        except RuntimeError:
            raise ValueError(f"is {self.path!r}; there is no such home folder") from None
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
    attention: Literal["auto", "in_place", "gathered", "kernel"] = "auto"
    warmup_s: Seconds = 20.0


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant's share and caps.

    `kv_share`: largest part of the KV budget its rows may reserve together.
    `kv_reserve`: part of the KV budget that others leave to it.
    `tokens_per_minute`: prompt and generated tokens; a request that goes beyond waits.
    `max_prefilling`: its rows in prefill beyond those whose chunks a step holds anyway.
    `max_priority`: highest class its requests may have; those that ask for more get it.
    """

    name: Name
    weight: Weight = 1.0
    max_running: Positive = 32
    max_waiting: Positive = 256
    kv_share: Fraction = 1.0
    kv_reserve: Annotated[float, Meta(ge=0, le=1)] = 0.0
    tokens_per_minute: Positive | None = None
    max_prefilling: Annotated[int, Meta(ge=1, le=1024)] = 2
    max_priority: PriorityName = "normal"


class TenantConfig(TenantLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`token_sha256`, `public_key`: what shows that a client is this tenant's; several while one is replaced.

    `operator`: it may also drain the daemon, reload its tenants and see the status of the engine and of every
    tenant.
    """

    token_sha256: Sha256 | Annotated[tuple[Sha256, ...], Several] | None = None
    public_key: PublicKey | Annotated[tuple[PublicKey, ...], Several] | None = None
    operator: bool = False

    @property
    def token_hashes(self) -> tuple[str, ...]:
        return _as_tuple(self.token_sha256)

    @property
    def public_keys(self) -> tuple[str, ...]:
        return _as_tuple(self.public_key)


def _as_tuple(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


class JournalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`durability`: "accepted" writes every accepted request, and its end, to the journal.

    `path`: an SQLite file, made if it is not there, in a folder that is its owner's alone.
    `fsync`: "always" survives a loss of power, "never" only the end of the process.
    `max_bytes`: of the file, half of it in equal parts for the tenants; who finds no room is rejected.
    """

    durability: Literal["none", "accepted"] = "none"
    path: Annotated[str, Meta(min_length=1)] | None = None
    fsync: Literal["always", "never"] = "always"
    max_bytes: Size = "1GiB"
