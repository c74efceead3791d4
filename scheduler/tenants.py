"""All tenants, and what happens to their requests."""

from collections.abc import Iterable, Iterator, Sequence

from mlxd.scheduler.ageing import Ageing
from mlxd.scheduler.config import SchedulerConfig, TenantLimits
from mlxd.scheduler.kv_space import KvSpace
from mlxd.scheduler.line import Line
from mlxd.scheduler.policy import Policy
from mlxd.scheduler.priority import Priority
from mlxd.scheduler.request import Request, RequestState
from mlxd.scheduler.reserves import Reserves
from mlxd.scheduler.tenant import Tenant


class TenantBook:
    """All tenants, and which of them have a queue.

    Attributes:
        queued: tenants with a queue, by name, in the order in which they became so.
        line: who of them is next.
        reserves: pages kept for tenants.
        waiting: queued requests of each class, their own and not the one that ageing raised them to.
        num_paused: requests of all tenants that neither run nor are queued.
        touched: names of tenants whose live state changed; whoever publishes it empties it.
    """

    def __init__(
        self, configs: Sequence[TenantLimits], scheduler: SchedulerConfig, space: KvSpace, policy: Policy
    ) -> None:
        """Nothing of `space` is promised yet."""
        self._tenants: dict[str, Tenant] = {}
        self._space = space
        self._reservable_bytes = space.plan.kv_bytes * scheduler.overcommit
        self._promisable = space.room
        self._ageing = Ageing(scheduler.ageing_s)
        self.waiting = [0] * len(Priority)
        self.num_paused = 0
        self.queued: dict[str, Tenant] = {}
        self.line = Line(policy)
        self._num_queues = 0
        self.update(configs, (), 0.0)

    def update(self, configs: Sequence[TenantLimits], requests: Iterable[Request], now: float) -> None:
        """Take new settings; what a tenant holds and was served stays. One that is gone holds nothing.

        Args:
            requests: all that are open.
        """
        before, self._tenants = self._tenants, {}
        for c in configs:
            tenant = before.pop(c.name, None)
            if tenant is None:
                tenant = Tenant.of(c, self._reservable_bytes)
            else:
                tenant.update(c, self._reservable_bytes, now)
            self._tenants[c.name] = tenant
        has_requests = any(gone.queue or gone.num_running or gone.num_paused for gone in before.values())
        assert not has_requests, "its requests have ended"
        self._space.keep_tenants({tenant.name: tenant.weight for tenant in self})
        self.reserves = Reserves({c.name: c.kv_reserve for c in configs}, self._promisable)
        for request in requests:
            self._hold(request)
        for tenant in self.queued.values():
            self.line.note(tenant)
        self.touched = set(self._tenants)

    def _hold(self, request: Request) -> None:
        """Count anew what an open request holds: pages promised, tokens of the minute."""
        bucket, has_row = self._tenants[request.tenant].bucket, request.row is not None
        if has_row:
            self.reserves.promise(request.tenant, request.worst_case)
        if bucket is not None:
            bucket.hold(request.quota if has_row else request.num_inflight)

    def __len__(self) -> int:
        return len(self._tenants)

    def __getitem__(self, name: str) -> Tenant:
        return self._tenants[name]

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    @property
    def best_waiting(self) -> int:
        """The highest class of a queued request; one below the lowest where none is queued."""
        return next((level for level, count in enumerate(self.waiting) if count), len(Priority))

    def enqueue(self, request: Request, now: float) -> None:
        tenant = self._tenants[request.tenant]
        if not tenant.queue.lanes[request.level]:
            self._ageing.begin(tenant.name, request.level, now)
        if not tenant.queue:
            self._num_queues += 1
            tenant.queue_number = self._num_queues
        tenant.queue.add(request)
        self.waiting[request.priority] += 1
        self.queued[tenant.name] = tenant
        self._note(tenant)

    def dequeue(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        tenant.queue.remove(request)
        if not tenant.queue.lanes[request.level]:
            self._ageing.end(tenant.name, request.level)
        self.waiting[request.priority] -= 1
        if not tenant.queue:
            del self.queued[tenant.name]
        self._note(tenant)

    def _note(self, tenant: Tenant) -> None:
        self.line.note(tenant)
        self.touched.add(tenant.name)

    def pause(self, request: Request) -> None:
        """A request that has no row and is not queued is kept so."""
        self._count_paused(request, 1)

    def unpause(self, request: Request) -> None:
        self._count_paused(request, -1)

    def _count_paused(self, request: Request, change: int) -> None:
        self._tenants[request.tenant].num_paused += change
        self.num_paused += change
        self.touched.add(request.tenant)

    def age(self, now: float) -> None:
        """Raise the first requests of lanes that have waited too long for those of higher classes."""
        for level in range(self.best_waiting + 1, len(Priority)):
            for name in self._ageing.due(level, now):
                self._ageing.begin(name, level, now)
                request = self._tenants[name].queue.to_rise(level)
                if request is not None:
                    self.dequeue(request)
                    request.level -= 1
                    self.enqueue(request, now)

    def drop(self, request: Request) -> None:
        """A request without a row ends."""
        if request in self._tenants[request.tenant].queue:
            self.dequeue(request)
        elif request.state is RequestState.PAUSED:
            self.unpause(request)

    def lose_token(self, request: Request) -> None:
        """A token in flight went wrong and will not count. A row's are released when it leaves."""
        tenant = self._tenants[request.tenant]
        if tenant.bucket is not None and request.row is None:
            tenant.bucket.release(1)
            self.line.note(tenant)
            self.touched.add(tenant.name)

    def use(self, tenant: Tenant, num_tokens: int, now: float) -> None:
        """Prompt or generated tokens were computed for a tenant, or found."""
        if tenant.bucket is not None:
            tenant.bucket.use(num_tokens, now)
        if not tenant.num_running:
            self.line.note(tenant)
        self.touched.add(tenant.name)

    def enter(self, request: Request, now: float) -> None:
        """A dequeued request got a row."""
        tenant = self._tenants[request.tenant]
        tenant.enter(request, self._space.bytes_of(request.worst_case))
        if tenant.queue.lanes[request.level]:
            self._ageing.begin(tenant.name, request.level, now)
        if tenant.bucket is not None:
            tenant.bucket.hold(request.quota)
        self.reserves.promise(tenant.name, request.worst_case)
        self._note(tenant)

    def leave(self, request: Request) -> None:
        """A request gives up its row; the tokens it has in flight are its tenant's to `use`, or lost."""
        tenant = self._tenants[request.tenant]
        tenant.leave(request, self._space.bytes_of(request.worst_case))
        self.reserves.release(tenant.name, request.worst_case)
        self._note(tenant)
