"""A tenant's queue and what its requests take of the machine."""

from dataclasses import dataclass, field

from mlxd.metrics.stats import TenantGauges
from mlxd.scheduler.config import TenantLimits
from mlxd.scheduler.lane import TenantQueue
from mlxd.scheduler.priority import Priority
from mlxd.scheduler.quota import TokenBucket, rated
from mlxd.scheduler.request import Request


@dataclass(slots=True, eq=False)
class Tenant:
    """Live state of one configured tenant.

    Attributes:
        max_kv_bytes: most bytes its rows may reserve together.
        max_prefilling: its rows in prefill beyond those whose chunks the step's budget holds.
        max_priority: highest class its requests may have.
        bucket: tokens it may use now; None: as many as it likes.
        is_held: whether a cap of its own kept its next request waiting when rows were given out last.
        queue: requests outside the batch. `queue_number`: order in which queues began, which it gets anew.
        num_running, reserved_bytes: its rows, and what they reserve.
        num_paused: its requests that neither run nor are queued.
        num_prefilling, prefill_left: its rows that prefill, and the positions they still have to compute.
        service: weighted tokens it was served, divided by its weight; moved by the policy alone.
        received: the same without what `service` was lifted by.
        work: weighted tokens that it was served, whatever its weight.
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
    queue_number: int = 0
    num_running: int = 0
    num_paused: int = 0
    reserved_bytes: int = 0
    num_prefilling: int = 0
    prefill_left: int = 0
    is_held: bool = False
    service: float = 0.0
    received: float = 0.0
    work: float = 0.0

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

    def ready_at(self, now: float) -> float:
        """When its minute has tokens for its next request."""
        return now if self.bucket is None else self.bucket.ready_at(self.head.quota, now)

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
        """Its request gives up its row; of its minute it still holds the tokens in flight."""
        self.num_running -= 1
        self.reserved_bytes -= reserved_bytes
        self.prefill_left -= request.prefill_left
        self.num_prefilling -= request.prefill_left > 0
        if self.bucket is not None:
            self.bucket.release(request.quota - request.num_inflight)

    def gauges(self) -> TenantGauges:
        return TenantGauges(
            len(self.queue),
            self.num_running,
            self.reserved_bytes,
            self.service,
            self.num_paused,
            self.work,
            None if self.bucket is None else self.bucket.gauges(),
        )
