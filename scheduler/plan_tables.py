"""What `mlxd check` prints."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table

from mlxd.caches.budget import show_bytes
from mlxd.caches.capacity import capacities, cost_of_packing
from mlxd.caches.sizing import MemoryPlan
from mlxd.scheduler.config import Config, TenantConfig
from mlxd.scheduler.fit import longest_context
from mlxd.scheduler.status import DiskStatus
from mlxd.scheduler.status_tables import show_disk
from mlxd.scheduler.tables import facts, page, table


def plan_tables(
    config: Config, model: str, blas: str, plan: MemoryPlan, disk: DiskStatus | None = None
) -> RenderableType:
    """The memory plan of a configuration, what its disk holds, and its tenants."""
    rows = capacities(plan, config.cache.checkpoint_share)
    assumed = " assumed" if config.scheduler.prefill_chunk == "auto" else ""
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
        *((("disk", show_disk(disk)),) if disk is not None else ()),
        ("prefill chunk", f"{plan.chunk} tokens{assumed}"),
    )
    return page(shown, _groups(plan), _tenants(config.tenants))


def _groups(plan: MemoryPlan) -> Table:
    return table(
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


def _tenants(tenants: Sequence[TenantConfig]) -> Table:
    return table(
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
            for tenant in tenants
        ),
    )


def _context(plan: MemoryPlan) -> str:
    fits = longest_context(plan)
    tail = "" if fits == plan.max_model_len else f", of which {fits} fit the budget"
    return f"{plan.max_model_len} tokens{tail}"


def _checkpoints(plan: MemoryPlan) -> str:
    if not any(group.spec.forgets for group in plan.groups):
        return "no effect: all layers are full attention"
    return show_bytes(sum(group.num_spare * group.spec.page_bytes for group in plan.groups))
