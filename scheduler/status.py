"""The parts of a status reply: what the daemon tells of a tenant, its disk, its journal and its engine."""

from typing import Literal

import msgspec


class TenantStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`paused`: until their clients read more. `generated_tokens`: sent since the start.

    `tokens_left`: of its tokens a minute, those that a new request may use now; None: they are not limited.
    `service`: weighted tokens over weight, as `fair` counts. That of a tenant that comes back is raised to
    what the busy ones have had, so it tells of them, and is None but for operators.
    `share`: its part of all weighted tokens since the start; None but for operators.
    `journal_bytes`: what its requests hold of the journal.
    """

    weight: float = 1.0
    waiting: int
    running: int
    paused: int = 0
    kv_reserved_bytes: int
    service: float | None = None
    share: float | None = None
    generated_tokens: int = 0
    tokens_left: int | None = None
    journal_bytes: int = 0


class DiskStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Prefixes on disk: `pages` files in `folder`, `used_bytes` of at most `max_bytes`.

    `is_off`: the disk failed; until a restart nothing more is stored or found.
    """

    folder: str
    pages: int
    used_bytes: int
    max_bytes: int
    is_off: bool = False


class JournalStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Accepted requests outlive the daemon.

    `used_bytes`: what they hold of at most `max_bytes`. `part_bytes`: what each tenant finds room for,
    whatever the others hold. All tenants fill it, so these are None but for operators.
    """

    fsync: Literal["always", "never"]
    used_bytes: int | None = None
    max_bytes: int | None = None
    part_bytes: int | None = None


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What all tenants together make of the engine, after its latest step. Times in seconds, sizes in bytes.

    `pages`: cache group -> pages held by rows, pages in all; `cached_pages`: those no row holds, kept for
    later prompts. `memory_planned_bytes`: weights and all pages. `out_of_memory`: times that memory ran out.
    """

    steps: int
    last_step_age_s: float | None
    kv_used_bytes: int
    kv_reserved_bytes: int
    pages: dict[str, tuple[int, int]]
    cached_pages: dict[str, int]
    graph_compiles: int
    graph_retraces: int
    graph_failures: int
    compiled_steps: int
    eager_steps: int
    buckets: tuple[str, ...]
    memory_active_bytes: int
    memory_peak_bytes: int
    memory_planned_bytes: int = 0
    out_of_memory: int = 0
