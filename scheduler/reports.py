"""What the daemon tells about itself in hello and status replies."""

from collections.abc import Mapping

from mlxd.batching.runner import RunnerInfo
from mlxd.metrics.stats import DiskStats, EngineSnapshot, TenantGauges
from mlxd.scheduler import messages as wire
from mlxd.scheduler.config import Config, DiskConfig, ServerConfig, TenantConfig
from mlxd.scheduler.frames import MAX_DEPTH, MAX_ITEMS, MAX_STRING_BYTES


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
) -> wire.StatusReply:
    """What depends on other tenants' work is shown to operators alone.

    Args:
        state: the daemon's.
        at: the engine at its latest step.
        generated_tokens: of each tenant since the start.
    """
    sees_all = asker.operator
    names = [t.name for t in config.tenants] if sees_all else [asker.name]
    tenants = {
        name: _tenant_status(at.tenants.get(name, TenantGauges()), generated_tokens.get(name, 0), sees_all)
        for name in names
    }
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
        notes=(info.notes if info else {}) | (at.notes if sees_all else {}),
        error=at.error,
    )


def _engine_status(at: EngineSnapshot, now: float) -> wire.EngineStatus:
    return wire.EngineStatus(
        steps=at.steps,
        last_step_age_s=now - at.last_step_at if at.last_step_at else None,
        kv_used_bytes=at.kv_used_bytes,
        kv_reserved_bytes=at.kv_reserved_bytes,
        pages=at.pages,
        cached_pages=at.cached_pages,
        graph_compiles=at.graph_compiles,
        graph_retraces=at.graph_retraces,
        graph_failures=at.graph_failures,
        compiled_steps=at.compiled_steps,
        eager_steps=at.eager_steps,
        buckets=at.buckets,
        memory_active_bytes=at.memory_active_bytes,
        memory_peak_bytes=at.memory_peak_bytes,
        memory_planned_bytes=at.memory_planned_bytes,
        out_of_memory=at.out_of_memory,
    )


def _disk_status(disk: DiskConfig | None, stats: DiskStats | None) -> wire.DiskStatus | None:
    if disk is None or stats is None:
        return None
    return wire.DiskStatus(
        folder=str(disk.folder),
        pages=stats.num_stored,
        used_bytes=stats.used_bytes,
        max_bytes=stats.capacity_bytes,
    )


def _tenant_status(gauges: TenantGauges, generated_tokens: int, sees_service: bool) -> wire.TenantStatus:
    return wire.TenantStatus(
        waiting=gauges.waiting,
        running=gauges.running,
        paused=gauges.paused,
        kv_reserved_bytes=gauges.kv_reserved_bytes,
        service=gauges.service if sees_service else None,
        generated_tokens=generated_tokens,
    )
