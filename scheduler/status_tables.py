"""What `mlxd status` prints."""

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta

from rich.console import RenderableType
from rich.table import Table

from mlxd.caches.budget import show_bytes
from mlxd.metrics.stats import FairnessStats
from mlxd.scheduler.messages import StatusReply
from mlxd.scheduler.status import DiskStatus, EngineStatus, JournalStatus, TenantStatus
from mlxd.scheduler.tables import facts, page, show_counts, table


def status_tables(
    status: StatusReply, before: StatusReply | None = None, *, details: bool = True
) -> RenderableType:
    """One look at a running daemon.

    Args:
        before: an earlier look: the pace since then is shown.
        details: show what was traced and what was chosen at start, which does not change.
    """
    pace = tokens_per_s(before, status) if before is not None else None
    shown = facts(
        ("model", status.model),
        ("state", f"{status.state}: {status.error}" if status.error else status.state),
        ("up", f"{timedelta(seconds=round(status.uptime_s))}"),
        (
            "tokens",
            f"{_generated(status)} generated" + ("" if pace is None else f", {pace:.1f} a second"),
        ),
        ("rows", f"{status.running} running, {status.waiting} waiting, {status.paused} paused"),
        ("KV capacity", show_bytes(status.kv_capacity_bytes)),
        *(() if status.engine is None else _engine(status.engine, details=details)),
        *((("disk", show_disk(status.disk)),) if status.disk is not None else ()),
        ("journal", _journal(status.journal)),
        *(() if status.fairness is None else _fairness(status.fairness)),
        *(status.notes.items() if details else ()),
    )
    return page(shown, _tenants(status.tenants, has_journal=status.journal is not None))


def tokens_per_s(before: StatusReply, now: StatusReply) -> float | None:
    """Generated tokens a second between two looks at one daemon; None where it was started anew."""
    passed_s = now.uptime_s - before.uptime_s
    if now.epoch != before.epoch or passed_s <= 0:
        return None
    return (_generated(now) - _generated(before)) / passed_s


def _generated(status: StatusReply) -> int:
    return sum(tenant.generated_tokens for tenant in status.tenants.values())


def show_disk(disk: DiskStatus) -> str:
    if disk.is_off:
        return f"{disk.folder}: failed, and is off until a restart"
    return f"{disk.folder}: {disk.pages} pages, {show_bytes(disk.used_bytes)} of {show_bytes(disk.max_bytes)}"


def _journal(journal: JournalStatus | None) -> str:
    if journal is None:
        return "off: requests end with the daemon"
    kept = f"on, fsync {journal.fsync}"
    if journal.used_bytes is None or journal.max_bytes is None:
        return kept
    part = "" if journal.part_bytes is None else f", {show_bytes(journal.part_bytes)} of it each tenant's own"
    return f"{kept}: {show_bytes(journal.used_bytes)} of {show_bytes(journal.max_bytes)}{part}"


def _tenants(tenants: Mapping[str, TenantStatus], *, has_journal: bool) -> Table:
    """A row a tenant; a column that says nothing of any tenant is left out."""
    is_limited = any(tenant.tokens_left is not None for tenant in tenants.values())
    is_operators = any(tenant.service is not None for tenant in tenants.values())
    return table(
        "Tenants",
        (
            *("tenant", "weight", "running", "waiting", "paused", "tokens"),
            *(("left a minute",) if is_limited else ()),
            "KV reserved",
            *(("journal",) if has_journal else ()),
            *(("service", "share") if is_operators else ()),
        ),
        (
            (
                name,
                f"{tenant.weight:g}",
                *map(str, (tenant.running, tenant.waiting, tenant.paused, tenant.generated_tokens)),
                *((_tokens_left(tenant),) if is_limited else ()),
                show_bytes(tenant.kv_reserved_bytes),
                *((show_bytes(tenant.journal_bytes),) if has_journal else ()),
                *(_service(tenant) if is_operators else ()),
            )
            for name, tenant in sorted(tenants.items())
        ),
    )


def _tokens_left(tenant: TenantStatus) -> str:
    return "any" if tenant.tokens_left is None else str(tenant.tokens_left)


def _service(tenant: TenantStatus) -> tuple[str, str]:
    if tenant.service is None or tenant.share is None:
        return "", ""
    return f"{tenant.service:.0f}", f"{tenant.share:.1%}"


def _engine(engine: EngineStatus, *, details: bool) -> list[tuple[str, str]]:
    age = "none yet" if engine.last_step_age_s is None else f"{engine.last_step_age_s:.1f} s ago"
    return [
        ("steps", f"{engine.steps}, the last {age}"),
        ("steps by kind", f"{engine.compiled_steps} compiled, {engine.eager_steps} eager"),
        ("KV", f"{show_bytes(engine.kv_used_bytes)} used, {show_bytes(engine.kv_reserved_bytes)} reserved"),
        *(
            (f"pages {name}", f"{held} of {total}, {engine.cached_pages.get(name, 0)} cached")
            for name, (held, total) in engine.pages.items()
        ),
        ("memory", _memory(engine)),
        (
            "graphs",
            f"{engine.graph_compiles} compiles, {engine.graph_retraces} retraces, "
            f"{engine.graph_failures} failures",
        ),
        *((("buckets", summarise_buckets(engine.buckets)),) if details else ()),
    ]


def _memory(engine: EngineStatus) -> str:
    active, peak, planned = engine.memory_active_bytes, engine.memory_peak_bytes, engine.memory_planned_bytes
    shown = f"{show_bytes(active)}, peak {show_bytes(peak)}; planned {show_bytes(planned)}"
    return f"{shown}; ran out {engine.out_of_memory} times" if engine.out_of_memory else shown


def _fairness(fairness: FairnessStats) -> list[tuple[str, str]]:
    return [
        ("fairness", f"service gap {fairness.service_gap:.0f}, Jain index {fairness.jain_index:.3f}"),
        ("waits", show_counts(fairness.waits)),
        ("preempted", show_counts(fairness.preemptions)),
        ("deadlines", show_counts(fairness.missed)),
    ]


def summarise_buckets(buckets: Sequence[str]) -> str:
    """What the traced graphs cover: ("rows=1 pages=2", "rows=4 pages=2") -> "2: rows=1,4 pages=2"."""
    values: dict[str, dict[str, None]] = {}
    for part in " ".join(buckets).split():
        key, _, value = part.partition("=")
        values.setdefault(key, {})[value] = None
    parts = [f"{key}={','.join(sorted(seen, key=_by_number))}" for key, seen in values.items()]
    return f"{len(buckets)}: {' '.join(parts)}" if buckets else "none"


def _by_number(text: str) -> tuple[list[int], str]:
    return [int(number) for number in re.findall(r"\d+", text)], text
