"""The KV memory rows live in: one pool a group, and the ledger over all."""

from mlxd.batching.row import Row
from mlxd.caches.ledger import Ledger, Reservation
from mlxd.caches.page_pool import PagePool, PoolExhaustedError
from mlxd.caches.page_table import PageTable
from mlxd.caches.sizing import MemoryPlan
from mlxd.scheduler.request import Request


class KvSpace:
    """Promises pages to requests that enter and hands them to their rows as they grow.

    With `overcommit` 1 a row that entered always gets its pages. Above 1 the pools may run dry; then a
    request enters only where the pages for its known tokens are free now, and one that was preempted before
    only where its worst case is, so that a preemption is worth its recomputation.
    """

    def __init__(self, plan: MemoryPlan, overcommit: float) -> None:
        self.plan = plan
        self.is_overcommitted = overcommit > 1
        self._ledger = Ledger(plan, overcommit)
        self._pools = tuple(PagePool(group.num_pages) for group in plan.groups)
        self._specs = tuple(group.spec for group in plan.groups)
        self._sliding = tuple(i for i, spec in enumerate(self._specs) if spec.window is not None)

    def worst_case(self, num_prompt: int, max_tokens: int) -> Reservation:
        """Most pages of a request; the token drawn last never gets a position."""
        return self._ledger.worst_case(num_prompt + max_tokens - 1)

    def ever_fits(self, reservation: Reservation) -> bool:
        return self._ledger.ever_fits(reservation)

    def can_enter(self, request: Request) -> bool:
        if not self._ledger.fits(request.worst_case):
            return False
        if not self.is_overcommitted:
            return True
        needed = request.worst_case if request.num_preemptions else self._ledger.worst_case(request.num_known)
        return all(n <= pool.num_free for n, pool in zip(needed.pages, self._pools, strict=True))

    def enter(self, row_id: int, request: Request) -> Row:
        """Reserve the worst case; the row's tables start empty."""
        self._ledger.reserve(row_id, request.worst_case)
        tables = tuple(PageTable(spec, pool) for spec, pool in zip(self._specs, self._pools, strict=True))
        return Row(row_id, request.sampling, request.seed, request.prompt, request.output, tables)

    def leave(self, row: Row) -> None:
        """Take the row's pages and promise back; a launched step may still use them: later ones wait."""
        for table in row.tables:
            table.clear()
        self._ledger.release(row.row_id)

    def grow(self, row: Row, start: int, end: int) -> bool:
        """Give positions [start, end) room and take back what no query from `start` on reads.

        False: the pages there are do not suffice; some groups may have grown. Only where overcommitted.
        """
        for group in self._sliding:
            row.tables[group].release_before(start)
        try:
            for table in row.tables:
                if table.end < end:
                    table.grow(end)
        except PoolExhaustedError:
            if not self.is_overcommitted:
                raise
            return False
        return True

    def take_scrub(self) -> tuple[tuple[int, ...], ...]:
        """Per group, pages to zero before the next launch; each is reported once."""
        return tuple(pool.take_scrub() for pool in self._pools)

    def bytes_of(self, reservation: Reservation) -> int:
        return self._ledger.bytes_of(reservation)

    @property
    def used_bytes(self) -> int:
        return sum(
            pool.num_held * spec.page_bytes for pool, spec in zip(self._pools, self._specs, strict=True)
        )

    @property
    def reserved_bytes(self) -> int:
        return self._ledger.reserved_bytes

    @property
    def pages(self) -> dict[str, tuple[int, int]]:
        """Group name -> (held, total)."""
        return {
            spec.name: (pool.num_held, pool.num_pages)
            for spec, pool in zip(self._specs, self._pools, strict=True)
        }

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page and every promise is accounted for."""
        for pool in self._pools:
            pool.check_integrity()
        self._ledger.check_integrity()

    def check_empty(self) -> None:
        """Raises AssertionError unless nothing is held or promised, as it must be with no row."""
        self.check_integrity()
        assert self.reserved_bytes == 0, f"{self.reserved_bytes} bytes are reserved with no row"
        assert self.used_bytes == 0, f"{self.used_bytes} bytes of pages are held with no row"
