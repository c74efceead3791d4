"""Which settings do not go with the model and the machine that are there: what the file alone cannot tell."""

import os
from pathlib import Path

from mlxd.batching.errors import SettingError
from mlxd.caches.budget import show_bytes
from mlxd.caches.sizing import GroupPlan, MemoryPlan
from mlxd.scheduler.config import Config, DiskConfig


def longest_context(plan: MemoryPlan) -> int:
    """Most positions that one request can ever have: the context, or what the pages hold if that is less."""
    return min(plan.max_model_len, *(_most_positions(group, plan) for group in plan.groups))


def _most_positions(group: GroupPlan, plan: MemoryPlan) -> int:
    if group.spec.pages_for(plan.max_model_len, plan.chunk) <= group.num_promised:
        return plan.max_model_len
    return group.num_promised * group.spec.page_size


def check_fit(config: Config, plan: MemoryPlan) -> None:
    """Raises SettingError for a setting that could never do what it is for."""
    check_shares(config, plan)
    if config.cache.disk is not None:
        check_disk(config.cache.disk, plan)


def check_disk(disk: DiskConfig, plan: MemoryPlan) -> None:
    """Raises SettingError for a folder that is none, or one that is to hold less than two pages.

    A page's file is a little larger than the page, so one that just fits would not.
    """
    place = _lowest_there(disk.folder)
    if not os.path.isdir(place):
        what = "it" if place == disk.folder else str(place)
        raise SettingError(("cache", "disk", "path"), f"is {disk.path!r}; {what} is not a folder")
    page_bytes = max(group.spec.page_bytes for group in plan.groups)
    if disk.capacity_bytes < 2 * page_bytes:
        sentence = (
            f"is {disk.max_bytes}; one page of this model takes {show_bytes(page_bytes)}, and two must fit"
        )
        raise SettingError(("cache", "disk", "max_bytes"), sentence)


def _lowest_there(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if os.path.exists(place) or place == place.parent)


def check_shares(config: Config, plan: MemoryPlan) -> None:
    """Raises SettingError for a tenant that could never run a request, not even one of a page."""
    smallest = sum(group.spec.page_bytes for group in plan.groups)
    kept = sum(tenant.kv_reserve for tenant in config.tenants)
    promised = plan.kv_bytes * config.scheduler.overcommit
    for index, tenant in enumerate(config.tenants):
        left = int((1 - kept + tenant.kv_reserve) * promised)
        if left < smallest:
            sentence = (
                f"keep too much: the kv_reserve of others leaves {tenant.name!r} {left} KV bytes; "
                f"the smallest request needs {smallest}"
            )
            raise SettingError(("tenants",), sentence)
        share = int(tenant.kv_share * promised)
        if share < smallest:
            sentence = (
                f"is {tenant.kv_share:g}, {share} of {plan.kv_bytes} KV bytes; the smallest request needs "
                f"{smallest}"
            )
            raise SettingError(("tenants", index, "kv_share"), sentence)
