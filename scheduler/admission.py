"""What may be queued, and which queued request enters the batch next."""

from collections.abc import Iterable

from mlxd.scheduler.config import SchedulerConfig
from mlxd.scheduler.events import Rejected
from mlxd.scheduler.kv_space import KvSpace
from mlxd.scheduler.policy import Policy
from mlxd.scheduler.request import Request
from mlxd.scheduler.tenants import Tenant

MAX_OVERTAKES = 8
"""Requests that may enter before one that waits for pages, though it was picked first."""

MAX_PREFILLING = 2
"""Rows of one tenant in prefill beyond those whose chunks the step's budget holds."""

_RETRY_MIN_MS, _RETRY_MAX_MS = 50, 60_000
_UNKNOWN_INTERVAL_S = 1.0
_SMOOTHING = 0.1


class Admission:
    """Decides by memory, caps and policy; changes nothing but `num_overtaken` of requests passed over."""

    def __init__(self, config: SchedulerConfig, space: KvSpace, policy: Policy) -> None:
        self._max_waiting = config.max_waiting
        self._space = space
        self._policy = policy
        self._leave_interval_s = _UNKNOWN_INTERVAL_S
        self._left_at: float | None = None

    def refuse(self, request: Request, tenant: Tenant, num_waiting: int) -> Rejected | None:
        """Why `request` cannot be queued; None if it can. `num_waiting` is that of all tenants."""
        never = self.never_fits(request, tenant)
        if never:
            return Rejected(request.key, "never_fits", never, retryable=False)
        if len(tenant.queue) >= tenant.max_waiting:
            count = len(tenant.queue)
            message = (
                f"tenant {tenant.name!r} has {count} waiting requests; the limit is {tenant.max_waiting}"
            )
            return self._full(request, message, count)
        if num_waiting >= self._max_waiting:
            return self._full(request, "the daemon's queue is full", num_waiting)
        return None

    def never_fits(self, request: Request, tenant: Tenant) -> str:
        """Why it could not even enter alone; empty if it could."""
        plan = self._space.plan
        num_prompt, max_tokens = len(request.prompt), request.sampling.max_tokens
        asked = f"{num_prompt} prompt tokens + max_tokens {max_tokens}"
        if num_prompt + max_tokens > plan.max_model_len:
            return f"{asked} is above the context of {plan.max_model_len} tokens"
        worst = self._space.bytes_of(request.worst_case)
        if not self._space.ever_fits(request.worst_case):
            return f"{asked} may need {worst} bytes of KV; there are {plan.kv_bytes}"
        if worst > tenant.max_kv_bytes:
            return f"{asked} may need {worst} bytes of KV; the tenant's share is {tenant.max_kv_bytes}"
        return ""

    def _full(self, request: Request, message: str, count: int) -> Rejected:
        wait_ms = int(1000 * self._leave_interval_s * max(1, count // 8))
        retry_after_ms = min(max(wait_ms, _RETRY_MIN_MS), _RETRY_MAX_MS)
        return Rejected(request.key, "queue_full", message, retryable=True, retry_after_ms=retry_after_ms)

    def row_left(self, now: float, num_open: int) -> None:
        """A row left; the pace of leaving while there is work says when a refused client should come back."""
        if self._left_at is not None:
            self._leave_interval_s += _SMOOTHING * (now - self._left_at - self._leave_interval_s)
        self._left_at = now if num_open else None

    def pick(self, queued: Iterable[Tenant], room: int, chunk: int) -> Request | None:
        """The request that enters next.

        A tenant at a cap of its own is passed over. A request that is only short of pages lets later picks
        enter before it, MAX_OVERTAKES in its life; then all wait for it.

        Args:
            queued: tenants with a queue.
            room: tokens of chunks this step's prefill budget still holds.
            chunk: tokens a full chunk has.
        """
        blocked: list[Request] = []
        for tenant in sorted(queued, key=self._policy.rank):
            request = tenant.head
            if not self._tenant_allows(tenant, request, request.chunk_end(chunk) <= room):
                continue
            if self._space.can_enter(request):
                for earlier in blocked:
                    earlier.num_overtaken += 1
                return request
            if request.num_overtaken >= MAX_OVERTAKES:
                return None
            blocked.append(request)
        return None

    def _tenant_allows(self, tenant: Tenant, request: Request, has_room: bool) -> bool:
        reserves = tenant.reserved_bytes + self._space.bytes_of(request.worst_case)
        return (
            tenant.num_running < tenant.max_running
            and reserves <= tenant.max_kv_bytes
            and (has_room or tenant.num_prefilling < MAX_PREFILLING)
            and request.num_inflight == 0
        )
