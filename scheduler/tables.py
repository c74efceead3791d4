"""What `mlxd check` and `mlxd status` print."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from mlxd.caches.sizing import MemoryPlan
from mlxd.scheduler.config import Config
from mlxd.scheduler.messages import StatusReply

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def show_bytes(size: int) -> str:
    """1536 -> "1.5 KiB"."""
    value, unit = float(size), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.4g} {_UNITS[unit]}"


def summarise_buckets(buckets: Sequence[str]) -> str:
    """What the traced graphs cover: ("rows=1 pages=2", "rows=4 pages=2") -> "2: rows=1,4 pages=2"."""
    values: dict[str, dict[str, None]] = {}
    for part in " ".join(buckets).split():
        key, _, value = part.partition("=")
        values.setdefault(key, {})[value] = None
    parts = [f"{key}={','.join(seen)}" for key, seen in values.items()]
    return f"{len(buckets)}: {' '.join(parts)}" if buckets else "none"


def plan_tables(config: Config, model: str, blas: str, plan: MemoryPlan) -> RenderableType:
    """The memory plan of a configuration, and its tenants."""
    facts = _facts(
        ("model", model),
        ("BLAS", blas),
        ("weights", show_bytes(plan.weights_bytes)),
        ("KV budget", f"{show_bytes(plan.budget_bytes)}, of which pages take {show_bytes(plan.kv_bytes)}"),
        ("max rows", str(plan.max_rows)),
        ("max context", f"{plan.max_model_len} tokens"),
        (
            "prefill chunk",
            f"{plan.chunk} tokens{' assumed' if config.scheduler.prefill_chunk == 'auto' else ''}",
        ),
    )
    groups = _table(
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
    tenants = _table(
        "Tenants",
        ("tenant", "weight", "max running", "max waiting", "KV share", "operator"),
        (
            (
                tenant.name,
                f"{tenant.weight:g}",
                str(tenant.max_running),
                str(tenant.max_waiting),
                f"{tenant.kv_share:.0%}",
                "yes" if tenant.operator else "",
            )
            for tenant in config.tenants
        ),
    )
    return Group(facts, groups, tenants)


def status_tables(status: StatusReply) -> RenderableType:
    """One look at a running daemon."""
    age = "none yet" if status.last_step_age_s is None else f"{status.last_step_age_s:.1f} s ago"
    facts = _facts(
        ("model", status.model),
        ("state", f"{status.state}: {status.error}" if status.error else status.state),
        ("rows", f"{status.running} running, {status.waiting} waiting"),
        ("steps", f"{status.steps}, the last {age}"),
        (
            "KV",
            f"{show_bytes(status.kv_used_bytes)} used, {show_bytes(status.kv_reserved_bytes)} reserved "
            f"of {show_bytes(status.kv_capacity_bytes)}",
        ),
        *((f"pages {name}", f"{held} of {total}") for name, (held, total) in status.pages.items()),
        ("memory", f"{show_bytes(status.memory_active_bytes)}, peak {show_bytes(status.memory_peak_bytes)}"),
        (
            "graphs",
            f"{status.graph_compiles} compiles, {status.graph_retraces} retraces, "
            f"{status.graph_failures} failures",
        ),
        ("steps by kind", f"{status.compiled_steps} compiled, {status.eager_steps} eager"),
        ("buckets", summarise_buckets(status.buckets)),
        *status.notes.items(),
    )
    tenants = _table(
        "Tenants",
        ("tenant", "running", "waiting", "KV reserved", "service"),
        (
            (
                name,
                str(tenant.running),
                str(tenant.waiting),
                show_bytes(tenant.kv_reserved_bytes),
                f"{tenant.service:.0f}",
            )
            for name, tenant in sorted(status.tenants.items())
        ),
    )
    return Group(facts, tenants)


def _facts(*pairs: tuple[str, str]) -> Table:
    table = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    for name, value in pairs:
        table.add_row(Text(name), Text(value))
    return table


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
