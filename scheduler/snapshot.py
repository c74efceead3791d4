"""The engine's state as others may see it."""

from dataclasses import replace

from mlxd.batching.runner import Runner
from mlxd.metrics.stats import EngineSnapshot, TenantGauges
from mlxd.scheduler.scheduler import Scheduler


class SnapshotMaker:
    """Makes snapshots; keeps the gauges of tenants that did not change. Runs on the engine thread."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._tenants: dict[str, TenantGauges] = {}
        self._notes = {"prefix": scheduler.space.prefix_note}

    def make(
        self, *, state: str, now: float, last_step_at: float, busy_since: float, out_of_memory: int = 0
    ) -> EngineSnapshot:
        scheduler, info = self._scheduler, self._runner.info
        prefilling, prefill_tokens_left = scheduler.batch.prefill_backlog()
        return EngineSnapshot(
            state=state,
            now=now,
            last_step_at=last_step_at,
            busy_since=busy_since,
            steps=scheduler.num_steps,
            waiting=scheduler.num_waiting,
            running=len(scheduler.batch),
            paused=len(scheduler.paused),
            prefilling=prefilling,
            prefill_tokens_left=prefill_tokens_left,
            tenants=self._gauges(),
            kv_used_bytes=scheduler.space.used_bytes,
            kv_reserved_bytes=scheduler.space.reserved_bytes,
            kv_capacity_bytes=info.memory.kv_bytes,
            pages=scheduler.space.pages,
            cached_pages=scheduler.space.cached_pages,
            prefix_evictions=scheduler.space.num_evicted,
            disk=scheduler.space.disk_stats,
            fairness=scheduler.fairness.stats(now),
            runner=self._runner.counters(),
            memory_planned_bytes=info.memory.weights_bytes + info.memory.kv_bytes,
            out_of_memory=out_of_memory,
            notes=info.notes | self._notes,
        )

    def _gauges(self) -> dict[str, TenantGauges]:
        book = self._scheduler.book
        if book.touched:
            kept = self._tenants if len(book.touched) < len(book) else {}  # of all, some may be gone
            self._tenants = kept | {name: book[name].gauges() for name in book.touched}
            book.touched.clear()
        return self._tenants


def after_failure(last: EngineSnapshot, error: str, now: float) -> EngineSnapshot:
    """`last` with nothing open and no KV held; counts stay."""
    return replace(
        last,
        state="failed",
        error=error,
        now=now,
        waiting=0,
        running=0,
        paused=0,
        prefilling=0,
        prefill_tokens_left=0,
        tenants={
            name: TenantGauges(service=gauges.service, work=gauges.work)
            for name, gauges in last.tenants.items()
        },
        kv_used_bytes=0,
        kv_reserved_bytes=0,
        pages={name: (0, total) for name, (_, total) in last.pages.items()},
        cached_pages=dict.fromkeys(last.cached_pages, 0),
    )
