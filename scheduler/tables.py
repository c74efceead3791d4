"""What `mlxd check` and `mlxd status` print."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from mlxd.caches.budget import show_bytes
from mlxd.caches.capacity import capacities, cost_of_packing
from mlxd.caches.sizing import MemoryPlan
from mlxd.metrics.stats import FairnessStats
from mlxd.scheduler.config import Config
from mlxd.scheduler.fit import longest_context
from mlxd.scheduler.messages import StatusReply
from mlxd.scheduler.status import DiskStatus, EngineStatus, JournalStatus, TenantStatus

_PIPE_WIDTH = 1000


def show(renderable: RenderableType) -> None:
    """Print tables to stdout. Off a terminal nothing is wrapped, and no line ends in spaces."""
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    with console.capture() as shown:
        console.print(renderable, soft_wrap=True)
    for line in shown.get().splitlines():
        print(line.rstrip())


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


def plan_tables(
    config: Config, model: str, blas: str, plan: MemoryPlan, disk: DiskStatus | None = None
) -> RenderableType:
    """The memory plan of a configuration, what its disk holds, and its tenants."""
    rows = capacities(plan, config.cache.checkpoint_share)
    shown = facts(
        ("model", model),
        ("BLAS", blas),
        ("weights", show_bytes(plan.weights_bytes)),
        ("KV budget", f"{show_bytes(plan.budget_bytes)}, of which pages take {show_bytes(plan.kv_bytes)}"),
        ("max rows", str(plan.max_rows)),
        ("max context", _context(plan)),
        ("rows at once", ", ".join(map(str, rows))),
        *((("warning", warning),) if (warning := cost_of_packing(rows)) else ()),
        ("checkpoints", _checkpoints(plan)),
        *((("disk", _disk(disk)),) if disk is not None else ()),
        (
            "prefill chunk",
            f"{plan.chunk} tokens{' assumed' if config.scheduler.prefill_chunk == 'auto' else ''}",
        ),
    )
    groups = table(
        "Cache groups",
        ("group", "layers", "B/token", "page size", "pages", "pages/row", "capacity"),
        (
            (
                group.spec.name,
                str(len(group.spec.layers)),
                str(group.spec.bytes_per_token or group.spec.state_bytes),
                "1 row" if group.spec.state_bytes else str(group.spec.page_size),
                str(group.num_pages),
                str(group.spec.pages_for(plan.max_model_len, plan.chunk)),
                show_bytes(group.capacity_bytes),
            )
            for group in plan.groups
        ),
    )
    tenants = table(
        "Tenants",
        (
            *("tenant", "weight", "max running", "max waiting", "KV share", "KV reserve", "tokens/min"),
            *("highest class", "operator"),
        ),
        (
            (
                tenant.name,
                f"{tenant.weight:g}",
                str(tenant.max_running),
                str(tenant.max_waiting),
                f"{tenant.kv_share * 100:.4g}%",
                f"{tenant.kv_reserve * 100:.4g}%",
                "any" if tenant.tokens_per_minute is None else str(tenant.tokens_per_minute),
                tenant.max_priority,
                "yes" if tenant.operator else "",
            )
            for tenant in config.tenants
        ),
    )
    return page(shown, groups, tenants)


def _context(plan: MemoryPlan) -> str:
    fits = longest_context(plan)
    tail = "" if fits == plan.max_model_len else f", of which {fits} fit the budget"
    return f"{plan.max_model_len} tokens{tail}"


def _checkpoints(plan: MemoryPlan) -> str:
    if not any(group.spec.forgets for group in plan.groups):
        return "no effect: all layers are full attention"
    return show_bytes(sum(group.num_spare * group.spec.page_bytes for group in plan.groups))


def _disk(disk: DiskStatus) -> str:
    return f"{disk.folder}: {disk.pages} pages, {show_bytes(disk.used_bytes)} of {show_bytes(disk.max_bytes)}"


def _journal(journal: JournalStatus | None) -> str:
    if journal is None:
        return "off: requests end with the daemon"
    kept = f"on, fsync {journal.fsync}"
    if journal.used_bytes is None or journal.max_bytes is None:
        return kept
    part = "" if journal.part_bytes is None else f", {show_bytes(journal.part_bytes)} of it each tenant's own"
    return f"{kept}: {show_bytes(journal.used_bytes)} of {show_bytes(journal.max_bytes)}{part}"


def tokens_per_s(before: StatusReply, now: StatusReply) -> float | None:
    """Generated tokens a second between two looks at one daemon; None where it was started anew."""
    passed_s = now.uptime_s - before.uptime_s
    if now.epoch != before.epoch or passed_s <= 0:
        return None
    return (_generated(now) - _generated(before)) / passed_s


def _generated(status: StatusReply) -> int:
    return sum(tenant.generated_tokens for tenant in status.tenants.values())


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
        *((("disk", _disk(status.disk)),) if status.disk is not None else ()),
        ("journal", _journal(status.journal)),
        *(() if status.fairness is None else _fairness(status.fairness)),
        *(status.notes.items() if details else ()),
    )
    return page(shown, _tenants(status.tenants, has_journal=status.journal is not None))


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


def show_counts(counts: Mapping[str, int]) -> str:
    """{"stop": 2, "failed": 0} -> "2 stop"."""
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if count) or "none"


def facts(*pairs: tuple[str, str]) -> Text:
    """A name and a value a line."""
    width = max(len(name) for name, _ in pairs)
    return Text("\n".join(f"{name:<{width}}  {value}" for name, value in pairs))


class _Table(Table):
    """Its columns stand closer together where the console is too narrow for it."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update(width=_PIPE_WIDTH)
        if self.__rich_measure__(console, unbounded).maximum > options.max_width:
            self.padding = 0
        return super().__rich_console__(console, options)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Numbers on the right of every column but the first."""
    made = _Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    made.add_column(columns[0])
    for column in columns[1:]:
        made.add_column(column, justify="right")
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def page(*parts: RenderableType) -> Group:
    """Parts with a blank line between them."""
    blank = Text("")
    return Group(*[line for part in parts for line in (part, blank)][:-1])
