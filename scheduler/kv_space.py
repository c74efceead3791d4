"""The KV memory rows live in: one pool a group, and the ledger over all."""

from mlxd.batching.row import Row
from mlxd.caches.ledger import Ledger, Reservation
from mlxd.caches.page_pool import PagePool, PoolExhaustedError
from mlxd.caches.page_table import PageTable
from mlxd.caches.prefix import PageChain, PrefixCache, why_not_reusable
from mlxd.caches.sizing import MemoryPlan
from mlxd.scheduler.request import Request


class KvSpace:
    """Promises pages to requests that enter and hands them to their rows as they grow.

    With `overcommit` 1 a row that entered always gets its pages. Above 1 the pools may run dry; then a
    request enters only where the pages for its known tokens are free now, and one that was preempted before
    only where its worst case is, so that a preemption is worth its recomputation.

    Rows leave their full pages to later requests of their tenant. Pages that only the prefix cache holds
    count as free: they are given up as soon as a row needs them.

    Attributes:
        prefix_note: whether prefixes are reused, and why not.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        overcommit: float,
        *,
        reuse: bool = True,
        identity: str = "",
        secret: bytes = b"",
    ) -> None:
        """
        Args:
            reuse: whether prefixes are kept where the groups allow it.
            identity, secret: of the prefix cache.
        """
        self.plan = plan
        self.is_overcommitted = overcommit > 1
        self._ledger = Ledger(plan, overcommit)
        self._pools = tuple(PagePool(group.num_pages) for group in plan.groups)
        self._specs = tuple(group.spec for group in plan.groups)
        self._sliding = tuple(i for i, spec in enumerate(self._specs) if spec.window is not None)
        reason = why_not_reusable(self._specs) if reuse else "cache.prefix is false"
        self.prefix_note = f"off: {reason}" if reason else "on"
        size = self._specs[0].page_size
        self._prefix = None if reason else PrefixCache(self._pools, size, identity, secret)

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
        unused = self._num_unused
        return all(n <= pool.num_free + unused for n, pool in zip(needed.pages, self._pools, strict=True))

    def enter(self, row_id: int, request: Request) -> Row:
        """Reserve the worst case; the row's tables begin with the cached pages of its known tokens.

        Its last known position is never among them: a decode step computes it.
        """
        self._ledger.reserve(row_id, request.worst_case)
        tables = tuple(PageTable(spec, pool) for spec, pool in zip(self._specs, self._pools, strict=True))
        row = Row(row_id, request.sampling, request.seed, request.prompt, request.output, tables)
        if self._prefix is not None:
            if request.chain is None:
                request.chain = self._prefix.chain(request.tenant)
            most = self._extend(request.chain, request, request.num_known - 1)
            pages = self._prefix.take(request.chain, most)
            for group, table in enumerate(tables):
                table.adopt([page[group] for page in pages])
            row.num_reused = len(pages) * self._prefix.page_size
        return row

    def share(self, request: Request) -> None:
        """Let later requests of its tenant begin with the full pages that its row has computed."""
        if self._prefix is not None and request.chain is not None and request.row is not None:
            num_pages = self._extend(request.chain, request, request.num_settled)
            self._prefix.share(request.chain, request.row.tables, num_pages)

    def forget(self, request: Request) -> None:
        """The request's numbers went wrong: keep no page of it, nor of those it began with."""
        if self._prefix is not None and request.chain is not None:
            self._prefix.forget(request.chain)

    def leave(self, request: Request) -> None:
        """Take the row's pages and promise back; a launched step may still use them: later ones wait.

        Its full pages stay in the prefix cache.
        """
        row = request.row
        assert row is not None
        if self._prefix is not None and request.chain is not None:
            num_pages = self._extend(request.chain, request, request.num_settled)
            self._prefix.leave(request.chain, row.tables, num_pages)
        for table in row.tables:
            table.clear()
        self._ledger.release(row.row_id)

    def _extend(self, chain: PageChain, request: Request, num_tokens: int) -> int:
        """Have keys for the full pages of the request's first `num_tokens` tokens; how many these are."""
        assert self._prefix is not None
        num_pages = num_tokens // self._prefix.page_size
        chain.extend(num_pages, self._prefix.page_size, request.tokens)
        return num_pages

    def grow(self, row: Row, start: int, end: int) -> bool:
        """Give positions [start, end) room and take back what no query from `start` on reads.

        False: the pages there are do not suffice; some groups may have grown. Only where overcommitted.
        """
        assert start >= row.num_reused, f"row {row.row_id} writes position {start} of a shared page"
        for group in self._sliding:
            row.tables[group].release_before(start)
        try:
            for table in row.tables:
                if table.end < end:
                    self._grow(table, end)
        except PoolExhaustedError:
            if not self.is_overcommitted:
                raise
            return False
        return True

    def _grow(self, table: PageTable, end: int) -> None:
        if self._prefix is not None:
            short = table.pages_short(end) - table.num_free
            if short > 0:
                self._prefix.evict(short)
        table.grow(end)

    def take_scrub(self) -> tuple[tuple[int, ...], ...]:
        """Per group, pages to zero before the next launch; each is reported once."""
        return tuple(pool.take_scrub() for pool in self._pools)

    def bytes_of(self, reservation: Reservation) -> int:
        return self._ledger.bytes_of(reservation)

    @property
    def _num_unused(self) -> int:
        return 0 if self._prefix is None else self._prefix.num_unused

    @property
    def used_bytes(self) -> int:
        """Bytes of pages that rows hold, each page once."""
        unused = self._num_unused
        return sum(
            (pool.num_held - unused) * spec.page_bytes
            for pool, spec in zip(self._pools, self._specs, strict=True)
        )

    @property
    def reserved_bytes(self) -> int:
        return self._ledger.reserved_bytes

    @property
    def pages(self) -> dict[str, tuple[int, int]]:
        """Group name -> (held by rows, total)."""
        unused = self._num_unused
        return {
            spec.name: (pool.num_held - unused, pool.num_pages)
            for spec, pool in zip(self._specs, self._pools, strict=True)
        }

    @property
    def cached_pages(self) -> dict[str, int]:
        """Group name -> pages that no row holds and that the prefix cache keeps."""
        return {spec.name: self._num_unused for spec in self._specs}

    @property
    def num_evicted(self) -> int:
        """Cached pages of each group given up for rows since the start."""
        return 0 if self._prefix is None else self._prefix.num_evicted

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page and every promise is accounted for."""
        for pool in self._pools:
            pool.check_integrity()
        if self._prefix is not None:
            self._prefix.check_integrity()
        self._ledger.check_integrity()

    def check_empty(self) -> None:
        """Raises AssertionError unless nothing is held or promised, as it must be with no row."""
        self.check_integrity()
        assert self.reserved_bytes == 0, f"{self.reserved_bytes} bytes are reserved with no row"
        assert self.used_bytes == 0, f"{self.used_bytes} bytes of pages are held with no row"
