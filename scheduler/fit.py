"""Which settings do not go with the model that is there: what the file alone cannot tell."""

from mlxd.batching.errors import SettingError
from mlxd.caches.sizing import GroupPlan, MemoryPlan
from mlxd.scheduler.config import Config


def longest_context(plan: MemoryPlan) -> int:
    """Most positions that one request can ever have: the context, or what the pages hold if that is less."""
    return min(plan.max_model_len, *(_most_positions(group, plan) for group in plan.groups))


def _most_positions(group: GroupPlan, plan: MemoryPlan) -> int:
    if group.spec.pages_for(plan.max_model_len, plan.chunk) <= group.num_promised:
        return plan.max_model_len
    return group.num_promised * group.spec.page_size


def check_shares(config: Config, plan: MemoryPlan) -> None:
    """Raises SettingError for a tenant that could never run a request, not even one of a page."""
    smallest = sum(group.spec.page_bytes for group in plan.groups)
    for index, tenant in enumerate(config.tenants):
        share = int(tenant.kv_share * plan.kv_bytes * config.scheduler.overcommit)
        if share < smallest:
            sentence = (
                f"is {tenant.kv_share:g}, {share} of {plan.kv_bytes} KV bytes; the smallest request needs "
                f"{smallest}"
            )
            raise SettingError(("tenants", index, "kv_share"), sentence)
