"""What the daemon tells about itself in hello and status replies."""

from collections.abc import Mapping, Sequence

from mlxd.batching.runner import RunnerInfo
from mlxd.caches.budget import parse_size
from mlxd.metrics.stats import DiskStats, EngineSnapshot, TenantGauges
from mlxd.scheduler import messages as wire
from mlxd.scheduler.config import Config, DiskConfig, JournalConfig, ServerConfig, TenantConfig
from mlxd.scheduler.frames import MAX_DEPTH, MAX_ITEMS, MAX_STRING_BYTES
from mlxd.scheduler.journal_room import JournalUsage
from mlxd.scheduler.quota import TokenBucket
from mlxd.scheduler.status import DiskStatus, EngineStatus, JournalStatus, TenantStatus


def limits(config: ServerConfig, info: RunnerInfo | None) -> wire.Limits:
    return wire.Limits(
        max_message_bytes=config.max_message_bytes,
        max_string_bytes=MAX_STRING_BYTES,
        max_items=MAX_ITEMS,
        max_depth=MAX_DEPTH,
        max_client_buffer_bytes=config.max_client_buffer_bytes,
        heartbeat_ms=config.heartbeat_ms,
        max_model_len=info.memory.max_model_len if info else 0,
        vocab_size=info.vocab_size if info else 0,
    )


def status_reply(
    reply_id: str,
    asker: TenantConfig,
    *,
    config: Config,
    state: str,
    epoch: str,
    info: RunnerInfo | None,
    at: EngineSnapshot,
    now: float,
    started_at: float,
    generated_tokens: Mapping[str, int],
    journal: JournalUsage,
) -> wire.StatusReply:
    """What depends on other tenants' work is shown to operators alone.

    Args:
        state: the daemon's.
        at: the engine at its latest step.
        generated_tokens: of each tenant since the start.
        journal: what its file holds.
    """
    sees_all = asker.operator
    shown = config.tenants if sees_all else (asker,)
    tenants = _tenants(shown, at.tenants, generated_tokens, journal.held, now, sees_all)
    return wire.StatusReply(
        id=reply_id,
        state=state,
        epoch=epoch,
        uptime_s=now - started_at,
        model=info.model if info else config.model.path,
        tenants=tenants,
        waiting=at.waiting if sees_all else tenants[asker.name].waiting,
        running=at.running if sees_all else tenants[asker.name].running,
        paused=at.paused if sees_all else tenants[asker.name].paused,
        kv_capacity_bytes=at.kv_capacity_bytes,
        engine=_engine_status(at, now) if sees_all else None,
        disk=_disk_status(config.cache.disk, at.disk) if sees_all else None,
        fairness=at.fairness if sees_all else None,
        journal=_journal_status(config.journal, journal if sees_all else None),
        notes=(info.notes if info else {}) | (at.notes if sees_all else {}),
        error=at.error,
    )


def _engine_status(at: EngineSnapshot, now: float) -> EngineStatus:
    return EngineStatus(
        steps=at.steps,
        last_step_age_s=now - at.last_step_at if at.last_step_at else None,
        kv_used_bytes=at.kv_used_bytes,
        kv_reserved_bytes=at.kv_reserved_bytes,
        pages=at.pages,
        cached_pages=at.cached_pages,
        graph_compiles=at.runner.graph_compiles,
        graph_retraces=at.runner.graph_retraces,
        graph_failures=at.runner.graph_failures,
        compiled_steps=at.runner.compiled_steps,
        eager_steps=at.runner.eager_steps,
        buckets=at.runner.buckets,
        memory_active_bytes=at.runner.memory_active_bytes,
        memory_peak_bytes=at.runner.memory_peak_bytes,
        memory_planned_bytes=at.memory_planned_bytes,
        out_of_memory=at.out_of_memory,
    )


def _disk_status(disk: DiskConfig | None, stats: DiskStats | None) -> DiskStatus | None:
    if disk is None or stats is None:
        return None
    return DiskStatus(
        folder=str(disk.folder),
        pages=stats.num_stored,
        used_bytes=stats.used_bytes,
        max_bytes=stats.capacity_bytes,
        is_off=stats.is_off,
    )


def _journal_status(config: JournalConfig, usage: JournalUsage | None) -> JournalStatus | None:
    """`usage`: None where the asker may not know."""
    if config.durability == "none":
        return None
    if usage is None:
        return JournalStatus(fsync=config.fsync)
    return JournalStatus(
        fsync=config.fsync,
        used_bytes=sum(usage.held.values()),
        max_bytes=parse_size(config.max_bytes),
        part_bytes=usage.part,
    )


def _tenants(
    shown: Sequence[TenantConfig],
    gauges: Mapping[str, TenantGauges],
    generated_tokens: Mapping[str, int],
    journal_bytes: Mapping[str, int],
    now: float,
    sees_all: bool,
) -> dict[str, TenantStatus]:
    all_work = sum(each.work for each in gauges.values())
    found = {}
    for tenant in shown:
        own = gauges.get(tenant.name, TenantGauges())
        found[tenant.name] = TenantStatus(
            weight=tenant.weight,
            waiting=own.waiting,
            running=own.running,
            paused=own.paused,
            kv_reserved_bytes=own.kv_reserved_bytes,
            service=own.service if sees_all else None,
            share=(own.work / all_work if all_work else 0.0) if sees_all else None,
            generated_tokens=generated_tokens.get(tenant.name, 0),
            tokens_left=_tokens_left(tenant, own, now),
            journal_bytes=journal_bytes.get(tenant.name, 0),
        )
    return found


def _tokens_left(tenant: TenantConfig, gauges: TenantGauges, now: float) -> int | None:
    """Until the engine tells, a tenant has all of them."""
    if tenant.tokens_per_minute is None or gauges.quota is None:
        return tenant.tokens_per_minute
    return TokenBucket.of(gauges.quota).left_at(now)
