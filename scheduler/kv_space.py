"""The KV memory rows live in: one pool a group, and the ledger over all."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from mlxd.batching.plan import RestoredPage
from mlxd.batching.row import Row
from mlxd.caches.disk_tier import DiskTier
from mlxd.caches.ledger import Ledger, Reservation
from mlxd.caches.page_pool import PagePool, PoolExhaustedError
from mlxd.caches.page_table import PageTable, page_tables
from mlxd.caches.prefix import PageChain, PrefixCache, PrefixEntry, why_not_reusable
from mlxd.caches.sizing import MemoryPlan
from mlxd.metrics.stats import DiskStats
from mlxd.scheduler.request import Request

_MOST_NEW = 4096
_MOST_SAVED = 8
"""Pages exported at once, between two steps."""
_IDLE_WAIT_S = 0.05

Export = Callable[[Sequence[tuple[int, ...]]], list[bytes]]


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
        disk: DiskTier | None = None,
    ) -> None:
        """
        Args:
            reuse: whether prefixes are kept where the groups allow it.
            identity, secret: of the prefix cache.
            disk: prefixes that are not in memory are looked for there.
        """
        self.plan = plan
        self.is_overcommitted = overcommit > 1
        self._ledger = Ledger(plan, overcommit)
        self._pools = tuple(PagePool(group.num_pages) for group in plan.groups)
        self._specs = tuple(group.spec for group in plan.groups)
        self._shrinking = tuple(i for i, spec in enumerate(self._specs) if spec.gives_back)
        reason = why_not_reusable(self._specs) if reuse else "cache.prefix is false"
        self.prefix_note = f"off: {reason}" if reason else "on"
        size = self._specs[0].page_size
        most_new = 0 if disk is None else _MOST_NEW
        self._prefix = None if reason else PrefixCache(self._pools, size, identity, secret, most_new=most_new)
        self._disk = None if reason else disk
        self._restored: list[tuple[PrefixEntry, RestoredPage]] = []

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
        unused = self._num_unused
        return all(n <= pool.num_free + unused for n, pool in zip(needed.pages, self._pools, strict=True))

    def enter(self, row_id: int, request: Request, token_s: float) -> Row:
        """Reserve the worst case; the row's tables begin with the cached pages of its known tokens.

        Its last known position is never among them: a decode step computes it.

        Args:
            token_s: seconds in which a token of prefill is computed; slower disks are not asked.
        """
        self._ledger.reserve(row_id, request.worst_case)
        tables = page_tables(self._specs, self._pools)
        row = Row(row_id, request.sampling, request.seed, request.prompt, request.output, tables)
        if self._prefix is not None:
            if request.chain is None:
                request.chain = self._prefix.chain(request.tenant)
            most = self._extend(request.chain, request, request.num_known - 1)
            pages = self._prefix.take(request.chain, most)
            for group, table in enumerate(tables):
                table.adopt([page[group] for page in pages])
            row.num_reused = len(pages) * self._prefix.page_size
            if self._disk is not None:
                self._restore(row, request.chain, most, token_s, self._prefix, self._disk)
        return row

    def _restore(
        self, row: Row, chain: PageChain, most: int, token_s: float, prefix: PrefixCache, disk: DiskTier
    ) -> None:
        """Find more of the chain's first `most` pages on disk; they are the row's own, and shared at once."""
        size = prefix.page_size
        while len(chain.entries) < most and chain.can_grow:
            index = len(chain.entries)
            payload = disk.load(chain.name(index), token_s * size)
            if payload is None or not self.grow(row, index * size, (index + 1) * size):
                break
            prefix.share(chain, row.tables, index + 1, is_new=False)
            row.num_reused = (index + 1) * size
            pages = tuple(table.pages[index] for table in row.tables)
            self._restored.append((chain.entries[index], RestoredPage(pages, payload)))
        disk.touch(reversed(chain.keys[: len(chain.entries)]))

    def take_restored(self) -> tuple[RestoredPage, ...]:
        """Pages to fill before the next launch; each is reported once, unless it is another's already."""
        restored, self._restored = self._restored, []
        if self._disk is not None:
            self._disk.begin_step()
        return tuple(page for entry, page in restored if not entry.is_forgotten)

    def save(self, export: Export, *, is_idle: bool) -> bool:
        """Hand some pages that are new in the prefix cache to the disk; whether more are left.

        Args:
            export: see Runner.export_pages; it waits for launched steps, so it is called for few pages only
                while idle.
            is_idle: there is nothing better to do than to wait for the disk, for a moment.
        """
        prefix, disk = self._prefix, self._disk
        if prefix is None or disk is None or prefix.num_new < (1 if is_idle else _MOST_SAVED):
            return False
        if disk.is_off:
            prefix.take_new(prefix.num_new)
            return False
        new = prefix.take_new(min(_MOST_SAVED, disk.room(_IDLE_WAIT_S if is_idle else 0.0)))
        missing = [(name, pages) for name, pages in new if name.key not in disk]
        if missing:
            payloads = export([pages for _, pages in missing])
            for (name, _), payload in zip(missing, payloads, strict=True):
                disk.save(name, payload)
        return prefix.num_new > 0

    @property
    def disk_stats(self) -> DiskStats | None:
        """None: there is no disk tier."""
        if self._prefix is None or self._disk is None:
            return None
        stats = self._disk.stats
        dropped = stats.pages["dropped"] + self._prefix.num_passed_over
        return replace(stats, pages=stats.pages | {"dropped": dropped})

    def share(self, request: Request) -> None:
        """Let later requests of its tenant begin with the full pages that its row has computed."""
        if self._prefix is not None and request.chain is not None and request.row is not None:
            num_pages = self._extend(request.chain, request, request.num_settled)
            self._prefix.share(request.chain, request.row.tables, num_pages)

    def forget(self, request: Request) -> None:
        """The request's numbers went wrong: keep no page of it, nor of those it began with."""
        if self._prefix is not None and request.chain is not None:
            keys = self._prefix.forget(request.chain)
            if self._disk is not None:
                self._disk.remove(keys)

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
        for group in self._shrinking:
            row.tables[group].release_before(start)
            until = self._specs[group].until
            if until is not None and start >= until:
                self._ledger.give_back(row.row_id, group)
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
