"""What may be queued, and which queued request enters the batch next."""

from collections.abc import Collection, Iterator

from mlxd.batching.runner import RunnerInfo
from mlxd.scheduler.backfill import Backfill
from mlxd.scheduler.config import SchedulerConfig
from mlxd.scheduler.events import Rejected
from mlxd.scheduler.kv_space import KvSpace
from mlxd.scheduler.line import Line
from mlxd.scheduler.policy import Policy
from mlxd.scheduler.preemption import Preemption
from mlxd.scheduler.request import Request
from mlxd.scheduler.tenant import Tenant
from mlxd.scheduler.tenants import TenantBook

_CAPS = ("max_running", "kv_share", "tokens_per_minute")
_RETRY_MIN_MS, _RETRY_MAX_MS = 50, 60_000
_UNKNOWN_INTERVAL_S = 1.0
_SMOOTHING = 0.1


class Admission:
    """Decides by memory, caps, class and policy; keeps who is held up, and by what.

    Attributes:
        reserving: who was picked first lately, and waits for pages.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        info: RunnerInfo,
        *,
        space: KvSpace,
        book: TenantBook,
        policy: Policy,
        preemption: Preemption,
    ) -> None:
        self._max_waiting = config.max_waiting
        self._backfill_s = config.backfill_s
        self._space = space
        self._book = book
        self._policy = policy
        self._preemption = preemption
        self._chunk = info.memory.chunk
        self._leave_interval_s = _UNKNOWN_INTERVAL_S
        self._left_at: float | None = None
        self.reserving: Request | None = None

    def refuse(self, request: Request, tenant: Tenant, num_waiting: int) -> Rejected | None:
        """Why `request` cannot be queued; None if it can.

        A paused request takes a place of its own tenant's and of nobody else's.

        Args:
            num_waiting: that of all tenants, without paused ones.
        """
        never = self.never_fits(request, tenant)
        if never:
            return Rejected(request.key, "never_fits", never, retryable=False)
        above = self.above_quota(request, tenant)
        if above:
            return Rejected(request.key, "quota", above, retryable=False)
        count = len(tenant.queue) + tenant.num_paused
        if count >= tenant.max_waiting:
            of_them = f", {tenant.num_paused} of them paused" if tenant.num_paused else ""
            limit = tenant.max_waiting
            message = f"tenant {tenant.name!r} has {count} waiting requests{of_them}; the limit is {limit}"
            return self._full(request, message, count)
        if num_waiting >= self._max_waiting:
            return self._full(request, "the daemon's queue is full", num_waiting)
        return None

    def queue(self, request: Request, now: float) -> None:
        """Let it wait. Its tenant begins to compete where nothing of this class or a higher one waited.

        Rows, and requests of lower classes, earn no credit: neither competed for what others got.
        """
        tenant = self._book[request.tenant]
        if not tenant.queue.competes(request.priority):
            self._policy.activate(tenant, self._book.line.rivals(tenant, request.level))
        self._book.enqueue(request, now)

    def never_fits(self, request: Request, tenant: Tenant) -> str:
        """Why it could not even enter alone; empty if it could."""
        plan, asked = self._space.plan, _asked(request)
        if len(request.prompt) + request.sampling.max_tokens > plan.max_model_len:
            return f"{asked} is above the context of {plan.max_model_len} tokens"
        worst = self._space.bytes_of(request.worst_case)
        if not self._space.ever_fits(request.worst_case):
            return f"{asked} may need {worst} bytes of KV; there are {plan.kv_bytes}"
        if worst > tenant.max_kv_bytes:
            return f"{asked} may need {worst} bytes of KV; the tenant's share is {tenant.max_kv_bytes}"
        if not self._book.reserves.ever_allows(tenant.name, request.worst_case):
            return f"{asked} may need {worst} bytes of KV; too many of {plan.kv_bytes} are kept for others"
        return ""

    def above_quota(self, request: Request, tenant: Tenant) -> str:
        """Why its tenant's minute could never hold what it may still use; empty if it could."""
        if tenant.bucket is None or request.quota <= tenant.bucket.per_minute:
            return ""
        per_minute = tenant.bucket.per_minute
        return f"{_asked(request)} is above the {per_minute} tokens a minute of tenant {tenant.name!r}"

    def _full(self, request: Request, message: str, count: int) -> Rejected:
        wait_ms = int(1000 * self._leave_interval_s * max(1, count // 8))
        retry_after_ms = min(max(wait_ms, _RETRY_MIN_MS), _RETRY_MAX_MS)
        return Rejected(request.key, "queue_full", message, retryable=True, retry_after_ms=retry_after_ms)

    def row_left(self, now: float, num_open: int) -> None:
        """A row left; the pace of leaving while there is work says when a refused client should come back."""
        if self._left_at is not None:
            self._leave_interval_s += _SMOOTHING * (now - self._left_at - self._leave_interval_s)
        self._left_at = now if num_open else None

    def pick(self, running: Collection[Request], room: int, now: float) -> Request | None:
        """The request that enters next, given that a row is free.

        A tenant at a cap of its own is passed over. The first request that is only short of pages waits for
        them; others enter before it where they do not put it off or would make way for it, for `backfill_s`
        at most. What a tenant keeps for itself is never waited for.

        Args:
            running: requests with a row.
            room: tokens of chunks this step's prefill budget still holds.
        """
        backfill: Backfill | None = None
        self.reserving = None
        for request in self._next_in_line(room, now):
            if self._fits(request):
                if backfill is None or self._is_own(request) or self._may_pass(request, backfill):
                    return request
            elif backfill is None and not self._is_kept_from(request):
                self.reserving = request
                if request.blocked_since is None:
                    request.blocked_since = now
                if now - request.blocked_since >= self._backfill_s:
                    return self._first_of_own(room, now)
                backfill = Backfill(request, running, self._space, self._book.reserves, self._chunk)
        return None

    def _may_pass(self, request: Request, backfill: Backfill) -> bool:
        return self._preemption.makes_way(request, backfill.waiting) or backfill.allows(request)

    def first(self, room: int, now: float) -> Request | None:
        """Who would be next if rows and pages did not lack."""
        return next(self._next_in_line(room, now), None)

    def is_short_of_pages(self, request: Request) -> bool:
        return not self._fits(request)

    def _first_of_own(self, room: int, now: float) -> Request | None:
        in_line = self._next_in_line(room, now)
        return next((request for request in in_line if self._is_own(request) and self._fits(request)), None)

    def _next_in_line(self, room: int, now: float) -> Iterator[Request]:
        """Each tenant's next request that no cap of the tenant holds back; in order."""
        line = self._book.line
        self._free_held(line, room, now)
        for tenant in line:
            reason = self.held_back(tenant, tenant.head, room, now)
            tenant.is_held = reason in _CAPS
            if tenant.is_held:
                line.note(tenant)
            elif not reason:
                yield tenant.head

    def _free_held(self, line: Line, room: int, now: float) -> None:
        """Tenants that no cap of theirs holds any more compete again."""
        for tenant in line.held(now):
            if self.held_back(tenant, tenant.head, room, now) not in _CAPS:
                tenant.is_held = False
                self._policy.activate(tenant, line.rivals(tenant, tenant.head.level))
                line.note(tenant)
            elif not tenant.num_running:
                line.stand_aside(tenant, tenant.ready_at(now))

    def held_back(self, tenant: Tenant, request: Request, room: int, now: float) -> str:
        """The tenant's setting that keeps its request waiting, or ""; "in_flight": its last row's token."""
        if tenant.num_running >= tenant.max_running:
            return "max_running"
        if tenant.reserved_bytes + self._space.bytes_of(request.worst_case) > tenant.max_kv_bytes:
            return "kv_share"
        if tenant.num_prefilling >= tenant.max_prefilling and request.chunk_end(self._chunk) > room:
            return "max_prefilling"
        if request.num_inflight:
            return "in_flight"
        if tenant.ready_at(now) > now:
            return "tokens_per_minute"
        return ""

    def why_waiting(self, tenant: Tenant, room: int, now: float, *, has_row: bool) -> str:
        """What the tenant's next request waits for: a setting of the tenant, "rows" or "pages"."""
        held_back = self.held_back(tenant, tenant.head, room, now)
        if held_back or not has_row:
            return held_back or "rows"
        return "kv_reserve" if self._is_kept_from(tenant.head) else "pages"

    def _fits(self, request: Request) -> bool:
        return self._space.can_enter(request, self._book.reserves.kept_from(request.tenant))

    def _is_own(self, request: Request) -> bool:
        """Whether it would enter on what is kept for its tenant."""
        return self._book.reserves.covers(request.tenant, request.worst_case)

    def _is_kept_from(self, request: Request) -> bool:
        """Whether it waits for pages that are kept for other tenants and nothing else."""
        return self._space.can_enter(request) and not self._fits(request)

    def ready_at(self, now: float) -> float | None:
        """When the first tenant has tokens for its next request, where a minute's tokens hold any back."""
        times = [tenant.ready_at(now) for tenant in self._book.queued.values() if tenant.bucket is not None]
        return min(times, default=None)


def _asked(request: Request) -> str:
    return f"{len(request.prompt)} prompt tokens + max_tokens {request.sampling.max_tokens}"
