"""A tenant's queue and what its requests take of the machine."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mlxd.metrics.stats import TenantGauges
from mlxd.scheduler.config import TenantConfig
from mlxd.scheduler.request import Request


@dataclass(slots=True, eq=False)
class Tenant:
    """Live state of one configured tenant.

    Attributes:
        max_kv_bytes: most bytes its rows may reserve together.
        queue: requests outside the batch by arrival number, next one first; preempted ones lead.
        num_running, reserved_bytes: its rows, and what they reserve.
        num_prefilling, prefill_left: its rows that prefill, and the positions they still have to compute.
        service: weighted tokens it was served, divided by its weight; moved by the policy alone.
    """

    name: str
    weight: float
    max_running: int
    max_waiting: int
    max_kv_bytes: int
    queue: OrderedDict[int, Request] = field(default_factory=OrderedDict)
    num_running: int = 0
    reserved_bytes: int = 0
    num_prefilling: int = 0
    prefill_left: int = 0
    service: float = 0.0

    @property
    def head(self) -> Request:
        """Its next request; the queue is not empty."""
        return next(iter(self.queue.values()))

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

    def gauges(self) -> TenantGauges:
        return TenantGauges(len(self.queue), self.num_running, self.reserved_bytes, self.service)


class TenantBook:
    """All tenants, and which of them have a queue.

    Attributes:
        queued: tenants with a queue, by name, in the order in which they became so.
        touched: names of tenants whose live state changed; whoever publishes it empties it.
    """

    def __init__(self, configs: Sequence[TenantConfig], reservable_bytes: float) -> None:
        """`reservable_bytes`: what all rows may reserve together; shares are of it."""
        self._reservable_bytes = reservable_bytes
        self._tenants: dict[str, Tenant] = {}
        self.queued: dict[str, Tenant] = {}
        self.touched: set[str] = set()
        self.update(configs)

    def update(self, configs: Sequence[TenantConfig]) -> None:
        """Take new settings; what a tenant holds and was served stays. One that is gone holds nothing."""
        before, self._tenants = self._tenants, {}
        for c in configs:
            max_kv_bytes = int(c.kv_share * self._reservable_bytes)
            tenant = before.pop(c.name, None)
            if tenant is None:
                tenant = Tenant(c.name, c.weight, c.max_running, c.max_waiting, max_kv_bytes)
            else:
                tenant.weight, tenant.max_kv_bytes = c.weight, max_kv_bytes
                tenant.max_running, tenant.max_waiting = c.max_running, c.max_waiting
            self._tenants[c.name] = tenant
        assert not any(gone.queue or gone.num_running for gone in before.values()), "its requests have ended"
        self.touched = set(self._tenants)

    def __len__(self) -> int:
        return len(self._tenants)

    def __getitem__(self, name: str) -> Tenant:
        return self._tenants[name]

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def enqueue(self, request: Request, *, first: bool = False) -> None:
        tenant = self._tenants[request.tenant]
        tenant.queue[request.number] = request
        if first:
            tenant.queue.move_to_end(request.number, last=False)
        self.queued[tenant.name] = tenant
        self.touched.add(tenant.name)

    def dequeue(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        del tenant.queue[request.number]
        if not tenant.queue:
            del self.queued[tenant.name]
        self.touched.add(tenant.name)
