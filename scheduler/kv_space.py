"""The KV memory rows live in: one pool a group, and the ledger over all."""

from collections.abc import Mapping, Sequence

from mlxd.batching.plan import RestoredPage
from mlxd.batching.row import Row
from mlxd.caches.disk_tier import DiskTier
from mlxd.caches.ledger import Ledger, Reservation
from mlxd.caches.page_pool import PagePool, PoolExhaustedError
from mlxd.caches.page_table import page_tables
from mlxd.caches.prefix import PrefixCache
from mlxd.caches.sizing import MemoryPlan
from mlxd.metrics.stats import DiskStats
from mlxd.scheduler.request import Request
from mlxd.scheduler.reuse import Export, PrefixReuse

_MOST_NEW = 4096


class KvSpace:
    """Promises pages to requests that enter and hands them to their rows as they grow.

    With `overcommit` 1 a row that entered always gets its pages. Above 1 the pools may run dry; then a
    request enters only where the pages for its known tokens are free now, and one that was preempted before
    only where its worst case is, so that a preemption is worth its recomputation.

    Rows leave what they computed to later requests of their tenant. Pages that only the prefix cache holds
    count as free: they are given up as soon as a row needs them, by whoever keeps most for its weight.

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
        disk: DiskTier | None = None,
    ) -> None:
        """
        Args:
            reuse: whether prefixes are kept.
            identity, secret: of the prefix cache.
            disk: prefixes that are not in memory are looked for there.
        """
        self.plan = plan
        self.is_overcommitted = overcommit > 1
        self._ledger = Ledger(plan, overcommit)
        self._pools = tuple(PagePool(group.num_pages) for group in plan.groups)
        self._specs = tuple(group.spec for group in plan.groups)
        self._page_size = plan.page_size
        self._shrinking = tuple(i for i, spec in enumerate(self._specs) if spec.gives_back)
        self.prefix_note = "on" if reuse else "off: cache.prefix is false"
        prefix = PrefixCache(
            self._specs,
            self._pools,
            self._page_size,
            identity,
            secret,
            most_new=0 if disk is None else _MOST_NEW,
        )
        self._kept = prefix.groups
        self._reuse = PrefixReuse(prefix, disk) if reuse else None
        self._recording = self._reuse if prefix.has_boundaries else None

    def worst_case(self, num_prompt: int, max_tokens: int) -> Reservation:
        """Most pages of a request; the token drawn last never gets a position."""
        return self._ledger.worst_case(num_prompt + max_tokens - 1)

    def ever_fits(self, reservation: Reservation) -> bool:
        return self._ledger.ever_fits(reservation)

    @property
    def room(self) -> tuple[int, ...]:
        """Pages a group that may still be promised."""
        return self._ledger.room

    def promised_to(self, request: Request) -> tuple[int, ...]:
        """Pages a group promised to a request with a row."""
        assert request.row is not None
        return self._ledger.promised(request.row.row_id).pages

    def lacking(self, request: Request, kept: Sequence[int]) -> list[int]:
        """Pages a group that a promise to `request` lacks, with `kept` ones to spare; below 0: beyond it."""
        needs = zip(request.worst_case.pages, kept, self._ledger.room, strict=True)
        return [n + spare - room for n, spare, room in needs]

    def can_enter(self, request: Request, kept: Sequence[int] = ()) -> bool:
        """Whether there is room for `request` now. `kept`: pages a group that are not for it."""
        if not self._ledger.fits(request.worst_case, kept):
            return False
        if not self.is_overcommitted:
            return True
        needed = request.worst_case if request.num_preemptions else self._ledger.worst_case(request.num_known)
        return all(n <= p.num_pages - p.num_used for n, p in zip(needed.pages, self._pools, strict=True))

    def keep_tenants(self, weights: Mapping[str, float]) -> None:
        """These are the tenants from now on: nobody finds what others computed, and it goes first."""
        if self._reuse is not None:
            self._reuse.keep_tenants(weights)

    def enter(self, row_id: int, request: Request, token_s: float) -> Row:
        """Reserve the worst case; the row's tables begin with the cached pages of its known tokens.

        Its last known position is never among them: a decode step computes it.

        Args:
            token_s: seconds in which a token of prefill is computed; slower disks are not asked.
        """
        self._ledger.reserve(row_id, request.worst_case)
        tables = page_tables(self._specs, self._pools)
        row = Row(row_id, request.sampling, request.seed, request.prompt, request.output, tables)
        if self._reuse is not None:
            self._reuse.enter(request, row, token_s)
        return row

    def num_kept(self, request: Request) -> int:
        """Positions that a row of `request` would begin with, could all be loaded that is on disk."""
        return 0 if self._reuse is None else self._reuse.num_kept(request)

    def share(self, request: Request) -> None:
        """Let later requests of its tenant begin with what its row has computed."""
        if self._reuse is not None:
            self._reuse.share(request)

    def forget(self, request: Request) -> None:
        """The request's numbers went wrong: keep no page of it, nor of those it began with."""
        if self._reuse is not None:
            self._reuse.forget(request)

    def forget_all(self) -> None:
        """What any page holds is not known: nobody may begin with one. Rows keep theirs until they leave."""
        if self._reuse is not None:
            self._reuse.clear()

    def leave(self, request: Request) -> None:
        """Take the row's pages and promise back; a launched step may still use them: later ones wait.

        What it computed stays in the prefix cache.
        """
        row = request.row
        assert row is not None
        if self._reuse is not None:
            self._reuse.leave(request)
        for table in row.tables:
            table.clear()
        self._ledger.release(row.row_id)

    def grow(self, request: Request, end: int) -> bool:
        """Give its row's positions up to `end` room and take back what no query reads any more.

        False: the pages there are do not suffice; some groups may have grown. Only where overcommitted.
        """
        start, page_size = request.num_computed, self._page_size
        if start % page_size and end % page_size and start > request.prefill_end:
            return True  # in the midst of a page a decode step changes nothing: all happens at its borders
        row = request.row
        assert row is not None
        assert start >= row.num_reused, f"row {row.row_id} writes position {start} of a shared page"
        if self._recording is not None:
            self._recording.record(request, start)
        if self._shrinking:
            self._shrink(row, start)
        try:
            for kept, table in zip(self._kept, row.tables, strict=True):
                if table.end < end:
                    kept.evict(table.pages_short(end) - table.num_free)
                    table.grow(end)
        except PoolExhaustedError:
            if not self.is_overcommitted:
                raise
            return False
        return True

    def _shrink(self, row: Row, start: int) -> None:
        for group in self._shrinking:
            row.tables[group].release_before(start)
            until = self._specs[group].until
            if until is not None and start >= until:
                self._ledger.give_back(row.row_id, group)

    def take_scrub(self) -> tuple[tuple[int, ...], ...]:
        """Per group, pages to zero before the next launch; each is reported once."""
        return tuple(pool.take_scrub() for pool in self._pools)

    def take_fills(self) -> tuple[tuple[tuple[tuple[int, int], ...], ...], tuple[RestoredPage, ...]]:
        """What to fill pages with before the next launch, after `take_scrub`; each is reported once.

        Returns:
            Per group (origin, page) of copies; and pages that come from elsewhere.
        """
        copies, restored = [], list[RestoredPage]()
        for group, pool in enumerate(self._pools):
            origins = pool.take_origins()
            copies.append(
                tuple((origin, page) for page, origin in origins.items() if isinstance(origin, int))
            )
            restored += [RestoredPage(group, p, o) for p, o in origins.items() if not isinstance(o, int)]
        if self._reuse is not None:
            self._reuse.begin_step()
        return tuple(copies), tuple(restored)

    def save(self, export: Export, *, is_idle: bool) -> bool:
        """See PrefixReuse.save."""
        return self._reuse is not None and self._reuse.save(export, is_idle=is_idle)

    @property
    def disk_stats(self) -> DiskStats | None:
        """None: there is no disk tier."""
        return None if self._reuse is None else self._reuse.disk_stats

    def bytes_of(self, reservation: Reservation) -> int:
        return self._ledger.bytes_of(reservation)

    @property
    def used_bytes(self) -> int:
        """Bytes of pages that rows hold, each page once."""
        return sum(p.num_used * spec.page_bytes for p, spec in zip(self._pools, self._specs, strict=True))

    @property
    def reserved_bytes(self) -> int:
        return self._ledger.reserved_bytes

    @property
    def pages(self) -> dict[str, tuple[int, int]]:
        """Group name -> (held by rows, total)."""
        pools = zip(self._specs, self._pools, strict=True)
        return {spec.name: (pool.num_used, pool.num_pages) for spec, pool in pools}

    @property
    def cached_pages(self) -> dict[str, int]:
        """Group name -> pages that no row holds and that the prefix cache keeps."""
        return {spec.name: pool.num_idle for spec, pool in zip(self._specs, self._pools, strict=True)}

    @property
    def num_evicted(self) -> int:
        """Cached pages given up because others were wanted, since the start."""
        return sum(kept.num_evicted for kept in self._kept)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page and every promise is accounted for."""
        for pool, kept in zip(self._pools, self._kept, strict=True):
            pool.check_integrity()
            kept.check_integrity()
        self._ledger.check_integrity()

    def check_empty(self) -> None:
        """Raises AssertionError unless nothing is held or promised, as it must be with no row."""
        self.check_integrity()
        assert self.reserved_bytes == 0, f"{self.reserved_bytes} bytes are reserved with no row"
        assert self.used_bytes == 0, f"{self.used_bytes} bytes of pages are held with no row"
