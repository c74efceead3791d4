"""Facts become numbers here: one method a fact, no lock, no queue."""

from collections.abc import Sequence

from mlxd.metrics.catalogue import Catalogue
from mlxd.metrics.instruments import OTHER, LabelGuard
from mlxd.metrics.stats import (
    DiskStats,
    EngineSnapshot,
    FairnessStats,
    RequestStats,
    RunnerCounters,
    StepStats,
    TenantGauges,
)

OUTCOMES = (
    *("stop", "length", "cancelled", "client_gone", "slow_client"),
    *("expired", "hopeless", "revoked", "failed", "draining"),
)
WAITS = (
    *("rows", "pages", "in_flight", "max_running", "max_prefilling"),
    *("kv_share", "kv_reserve", "tokens_per_minute"),
)
STATES = ("starting", "running", "draining", "stopped", "failed")
STEP_KINDS = ("decode", "prefill", "mixed")

MAX_TENANT_LABELS = 200
MAX_OPEN_LABELS = 32


class Tally:
    """Writes facts into `catalogue`; its owner sees to it that one thread at a time is inside.

    Args:
        tenants: names that become label values, the first `MAX_TENANT_LABELS` of them.
    """

    def __init__(self, tenants: Sequence[str], version: str, started_unix_s: float) -> None:
        self.catalogue = Catalogue()
        self._tenants = (*tenants[:MAX_TENANT_LABELS], OTHER)
        self._tenant = LabelGuard(self._tenants)
        self._rejection = LabelGuard(limit=MAX_OPEN_LABELS)
        self._preemption = LabelGuard(limit=MAX_OPEN_LABELS)
        self._kind = LabelGuard(limit=MAX_OPEN_LABELS)
        self._fault = LabelGuard(limit=MAX_OPEN_LABELS)
        self._snapshot = EngineSnapshot()
        self.catalogue.process.build.set(1, version)
        self.catalogue.process.start.set(started_unix_s)
        self._start_at_zero()

    def _start_at_zero(self) -> None:
        """Series whose labels are known begin at 0, else `rate()` would miss their first event."""
        steps, wire = self.catalogue.steps, self.catalogue.wire
        self._start_tenants_at_zero(self._tenants)
        for kind in STEP_KINDS:
            steps.steps.add(0, kind)
        for part in ("decode", "prefill"):
            steps.device_time.add(0, part)
        for op in ("join", "leave"):
            steps.batch_changes.add(0, op)
        steps.rows.add(0)
        wire.clients.set(0)
        wire.client_buffer.set(0)

    def _start_tenants_at_zero(self, tenants: Sequence[str]) -> None:
        requests = self.catalogue.requests
        for tenant in tenants:
            requests.accepted.add(0, tenant)
            for source in ("computed", "recomputed", "cached"):
                requests.prompt_tokens.add(0, tenant, source)
            requests.prefix_query_tokens.add(0, tenant)
            requests.prefix_hit_tokens.add(0, tenant)
            requests.generation_tokens.add(0, tenant)
            for outcome in OUTCOMES:
                requests.ended.add(0, tenant, outcome)

    def add_tenants(self, names: Sequence[str]) -> None:
        """Names become label values while there is room; those that had been keep theirs."""
        known = self._tenants[:-1]
        new = [name for name in names if name not in known][: MAX_TENANT_LABELS - len(known)]
        self._tenants = (*known, *new, OTHER)
        self._tenant = LabelGuard(self._tenants)
        self._start_tenants_at_zero(new)

    def accepted(self, tenant: str) -> None:
        self.catalogue.requests.accepted.add(1, self._tenant(tenant))

    def rejected(self, tenant: str, reason: str) -> None:
        self.catalogue.requests.rejected.add(1, self._tenant(tenant), self._rejection(reason))

    def request(self, stats: RequestStats) -> None:
        requests, tenant = self.catalogue.requests, self._tenant(stats.tenant)
        requests.ended.add(1, tenant, stats.outcome)
        requests.duration.observe(stats.duration_s)
        requests.request_prompt_tokens.observe(stats.prompt_tokens)
        requests.request_generation_tokens.observe(stats.generated_tokens)
        if stats.queue_s is not None:
            requests.queue_time.observe(stats.queue_s, tenant)
        if stats.first_token_s is not None:
            requests.time_to_first_token.observe(stats.first_token_s, tenant)

    def step(self, stats: StepStats) -> None:
        requests, steps = self.catalogue.requests, self.catalogue.steps
        for source, counts in (
            ("computed", stats.prompt_tokens),
            ("recomputed", stats.recomputed_tokens),
            ("cached", stats.cached_tokens),
        ):
            for tenant, tokens in counts.items():
                requests.prompt_tokens.add(tokens, self._tenant(tenant), source)
        for counter, counts in (
            (requests.prefix_query_tokens, stats.prefix_query_tokens),
            (requests.prefix_hit_tokens, stats.prefix_hit_tokens),
        ):
            for tenant, tokens in counts.items():
                counter.add(tokens, self._tenant(tenant))
        for tenant, tokens in stats.generated_tokens.items():
            requests.generation_tokens.add(tokens, self._tenant(tenant))
        kind = _kind_of(stats)
        steps.steps.add(1, kind)
        steps.rows.add(stats.decode_rows)
        steps.duration.observe(stats.step_s, kind)
        steps.device_time.add(stats.decode_s, "decode")
        steps.device_time.add(stats.prefill_s, "prefill")
        steps.token_gap.observe_all(stats.token_gaps_s)
        for op, rows, seconds in (("join", stats.joined, stats.join_s), ("leave", stats.left, stats.leave_s)):
            if rows:
                steps.batch_changes.add(rows, op)
                steps.batch_change_time.observe(seconds, op)
        for reason, rows in stats.preemptions.items():
            steps.batch_changes.add(rows, "leave")
            steps.preemptions.add(rows, self._preemption(reason))

    def message(self, direction: str, kind: str) -> None:
        self.catalogue.wire.messages.add(1, direction, self._kind(kind))

    def bad_message(self, reason: str) -> None:
        self.catalogue.wire.bad_messages.add(1, self._fault(reason))

    def clients(self, connected: int, buffered_bytes: int) -> None:
        self.catalogue.wire.clients.set(connected)
        self.catalogue.wire.client_buffer.set(buffered_bytes)

    def journal(self, written: int, failed: int, seconds: float) -> None:
        journal = self.catalogue.journal
        journal.writes.add(1)
        journal.write_time.add(seconds)
        journal.changes.add(written, "written")
        journal.changes.add(failed, "failed")

    def snapshot(self, snapshot: EngineSnapshot, unix_s: float) -> None:
        """Keep it for `show`; `unix_s` is the time of day at `snapshot.now`."""
        if snapshot.last_step_at != self._snapshot.last_step_at:
            self.catalogue.engine.last_step.set(unix_s - (snapshot.now - snapshot.last_step_at))
        self._snapshot = snapshot

    def show(self) -> None:
        """Set the gauges and followed counters to what the latest snapshot says."""
        snapshot, engine = self._snapshot, self.catalogue.engine
        for state in STATES:
            engine.state.set(float(state == snapshot.state), state)
        self._show_tenants(snapshot.tenants)
        engine.prefilling.set(snapshot.prefilling)
        engine.prefill_left.set(snapshot.prefill_tokens_left)
        engine.kv.set(snapshot.kv_used_bytes, "used")
        engine.kv.set(snapshot.kv_reserved_bytes, "reserved")
        engine.kv.set(snapshot.kv_capacity_bytes, "capacity")
        for group, (held, total) in snapshot.pages.items():
            cached = snapshot.cached_pages.get(group, 0)
            engine.pages.set(held, group, "held")
            engine.pages.set(cached, group, "cached")
            engine.pages.set(total - held - cached, group, "free")
        engine.prefix_evictions.raise_to(snapshot.prefix_evictions)
        if snapshot.disk is not None:
            self._show_disk(snapshot.disk)
        self._show_fairness(snapshot.fairness)
        self._show_runner(snapshot.runner)
        engine.memory.set(snapshot.memory_planned_bytes, "planned")
        engine.out_of_memory.raise_to(snapshot.out_of_memory)

    def _show_runner(self, runner: RunnerCounters) -> None:
        engine = self.catalogue.engine
        engine.compiles.raise_to(runner.graph_compiles)
        engine.retraces.raise_to(runner.graph_retraces)
        engine.graph_failures.raise_to(runner.graph_failures)
        engine.decode_steps.raise_to(runner.compiled_steps, "compiled")
        engine.decode_steps.raise_to(runner.eager_steps, "eager")
        engine.memory.set(runner.memory_active_bytes, "active")
        engine.memory.set(runner.memory_peak_bytes, "peak")
        engine.memory.set(runner.memory_cache_bytes, "cache")

    def _show_fairness(self, fairness: FairnessStats) -> None:
        engine = self.catalogue.engine
        engine.service_gap.set(fairness.service_gap)
        engine.jain_index.set(fairness.jain_index)
        for reason in WAITS:
            engine.waits.set(fairness.waits.get(reason, 0), reason)

    def _show_disk(self, disk: DiskStats) -> None:
        engine = self.catalogue.engine
        engine.disk.set(disk.used_bytes, "used")
        engine.disk.set(disk.capacity_bytes, "capacity")
        for op, pages in disk.pages.items():
            engine.disk_pages.raise_to(pages, op)
        for reason, pages in disk.misses.items():
            engine.disk_misses.raise_to(pages, reason)
        engine.disk_time.raise_to(disk.load_s, "load")
        engine.disk_time.raise_to(disk.save_s, "save")

    def _show_tenants(self, tenants: dict[str, TenantGauges]) -> None:
        engine = self.catalogue.engine
        for name in self._tenants:
            named = tenants.get(name, TenantGauges()) if name != OTHER else self._others(tenants)
            engine.running.set(named.running, name)
            engine.waiting.set(named.waiting, name)
            engine.paused.set(named.paused, name)
            engine.tenant_kv.set(named.kv_reserved_bytes, name)
            engine.service.raise_to(named.service, name)

    def _others(self, tenants: dict[str, TenantGauges]) -> TenantGauges:
        """The tenants without a label of their own, added up."""
        others = [gauges for name, gauges in tenants.items() if self._tenant(name) == OTHER]
        return TenantGauges(
            waiting=sum(gauges.waiting for gauges in others),
            running=sum(gauges.running for gauges in others),
            kv_reserved_bytes=sum(gauges.kv_reserved_bytes for gauges in others),
            service=sum(gauges.service for gauges in others),
            paused=sum(gauges.paused for gauges in others),
        )


def _kind_of(stats: StepStats) -> str:
    if not stats.prefill_rows:
        return "decode"
    return "mixed" if stats.decode_rows else "prefill"
