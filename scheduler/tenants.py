"""A tenant's queue and what its requests take of the machine."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from mlxd.metrics.stats import TenantGauges
from mlxd.scheduler.ageing import Ageing
from mlxd.scheduler.config import SchedulerConfig, TenantLimits
from mlxd.scheduler.kv_space import KvSpace
from mlxd.scheduler.lane import TenantQueue
from mlxd.scheduler.priority import Priority
from mlxd.scheduler.quota import TokenBucket, rated
from mlxd.scheduler.request import Request, RequestState
from mlxd.scheduler.reserves import Reserves


@dataclass(slots=True, eq=False)
class Tenant:
    """Live state of one configured tenant.

    Attributes:
        max_kv_bytes: most bytes its rows may reserve together.
        max_prefilling: its rows in prefill beyond those whose chunks the step's budget holds.
        max_priority: highest class its requests may have.
        bucket: tokens it may use now; None: as many as it likes.
        is_held: whether a cap of its own kept its next request waiting when rows were given out last.
        queue: requests outside the batch.
        num_running, reserved_bytes: its rows, and what they reserve.
        num_paused: its requests that neither run nor are queued.
        num_prefilling, prefill_left: its rows that prefill, and the positions they still have to compute.
        service: weighted tokens it was served, divided by its weight; moved by the policy alone.
        received: the same without what `service` was lifted by.
    """

    name: str
    weight: float
    max_running: int
    max_waiting: int
    max_kv_bytes: int
    max_prefilling: int = 2
    max_priority: Priority = Priority.INTERACTIVE
    bucket: TokenBucket | None = None
    queue: TenantQueue = field(default_factory=TenantQueue)
    num_running: int = 0
    num_paused: int = 0
    reserved_bytes: int = 0
    num_prefilling: int = 0
    prefill_left: int = 0
    is_held: bool = False
    service: float = 0.0
    received: float = 0.0

    @classmethod
    def of(cls, config: TenantLimits, reservable_bytes: float) -> "Tenant":
        """`reservable_bytes`: what all rows may reserve together; its share is of it."""
        tenant = cls(config.name, config.weight, config.max_running, config.max_waiting, max_kv_bytes=0)
        tenant.update(config, reservable_bytes, 0.0)
        return tenant

    def update(self, config: TenantLimits, reservable_bytes: float, now: float) -> None:
        """Take new settings; of a bucket nothing is held then."""
        self.weight = config.weight
        self.max_running = config.max_running
        self.max_waiting = config.max_waiting
        self.max_kv_bytes = int(config.kv_share * reservable_bytes)
        self.max_prefilling = config.max_prefilling
        self.max_priority = Priority.of(config.max_priority)
        self.bucket = rated(self.bucket, config.tokens_per_minute, now)

    @property
    def head(self) -> Request:
        """Its next request; the queue is not empty."""
        assert self.queue.head is not None
        return self.queue.head

    def enter(self, request: Request, reserved_bytes: int) -> None:
        """Its request got a row."""
        self.num_running += 1
        self.reserved_bytes += reserved_bytes
        self.prefill_left += request.prefill_left
        self.num_prefilling += request.prefill_left > 0

    def prefilled(self, request: Request, num_tokens: int) -> None:
        """A chunk of its row was scheduled; `request.prefill_left` is what comes after it."""
        self.prefill_left -= num_tokens
        self.num_prefilling -= request.prefill_left == 0

    def leave(self, request: Request, reserved_bytes: int) -> None:
        """Its request gives up its row."""
        self.num_running -= 1
        self.reserved_bytes -= reserved_bytes
        self.prefill_left -= request.prefill_left
        self.num_prefilling -= request.prefill_left > 0
        if self.bucket is not None:
            to_come = 0 if request.state is RequestState.RUNNING else request.num_inflight
            self.bucket.release(request.quota - to_come)

    def gauges(self) -> TenantGauges:
        return TenantGauges(
            len(self.queue), self.num_running, self.reserved_bytes, self.service, self.num_paused
        )


class TenantBook:
    """All tenants, and which of them have a queue.

    Attributes:
        queued: tenants with a queue, by name, in the order in which they became so.
        reserves: pages kept for tenants.
        waiting: queued requests of each class, their own and not the one that ageing raised them to.
        num_paused: requests of all tenants that neither run nor are queued.
        touched: names of tenants whose live state changed; whoever publishes it empties it.
    """

    def __init__(self, configs: Sequence[TenantLimits], scheduler: SchedulerConfig, space: KvSpace) -> None:
        """Nothing of `space` is promised yet."""
        self._tenants: dict[str, Tenant] = {}
        self._space = space
        self._reservable_bytes = space.plan.kv_bytes * scheduler.overcommit
        self._promisable = space.room
        self._ageing = Ageing(scheduler.ageing_s)
        self.waiting = [0] * len(Priority)
        self.num_paused = 0
        self.queued: dict[str, Tenant] = {}
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
        self.reserves = Reserves({c.name: c.kv_reserve for c in configs}, self._promisable)
        for request in requests:
            self._hold(request)
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

    def peers(self, request: Request) -> list[Tenant]:
        """Other tenants that compete with the request's: not held by a cap; of its class, if any is."""
        free = [t for t in self.queued.values() if not t.is_held and t.name != request.tenant]
        return [tenant for tenant in free if tenant.head.level == request.level] or free

    def enqueue(self, request: Request, now: float) -> None:
        tenant = self._tenants[request.tenant]
        if not tenant.queue.lanes[request.level]:
            self._ageing.begin(tenant.name, request.level, now)
        tenant.queue.add(request)
        self.waiting[request.priority] += 1
        self.queued[tenant.name] = tenant
        self.touched.add(tenant.name)

    def dequeue(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        tenant.queue.remove(request)
        if not tenant.queue.lanes[request.level]:
            self._ageing.end(tenant.name, request.level)
        self.waiting[request.priority] -= 1
        if not tenant.queue:
            del self.queued[tenant.name]
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
        """A request without a row ended; tokens of the row it had may be in flight and will not count."""
        tenant = self._tenants[request.tenant]
        if request in tenant.queue:
            self.dequeue(request)
        elif request.state is RequestState.PAUSED:
            self.unpause(request)
        if tenant.bucket is not None:
            tenant.bucket.release(request.num_inflight)

    def lose_token(self, request: Request) -> None:
        """A token in flight went wrong and will not count. A row's are released when it leaves."""
        bucket = self._tenants[request.tenant].bucket
        if bucket is not None and request.row is None:
            bucket.release(1)

    def use(self, tenant: Tenant, num_tokens: int, now: float) -> None:
        """Prompt or generated tokens were computed for a tenant, or found."""
        if tenant.bucket is not None:
            tenant.bucket.use(num_tokens, now)
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
        self.touched.add(tenant.name)

    def leave(self, request: Request) -> None:
        """A request gives up its row."""
        tenant = self._tenants[request.tenant]
        tenant.leave(request, self._space.bytes_of(request.worst_case))
        self.reserves.release(tenant.name, request.worst_case)
        self.touched.add(tenant.name)
