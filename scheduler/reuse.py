"""What requests find of earlier ones of their tenant, in memory and on disk."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from mlxd.batching.row import Row
from mlxd.caches.chain import PageChain
from mlxd.caches.disk_tier import DiskTier
from mlxd.caches.namespaces import Namespaces
from mlxd.caches.prefix import PrefixCache
from mlxd.metrics.stats import DiskStats
from mlxd.scheduler.request import Request

logger = logging.getLogger(__name__)

_MOST_SAVED = 8
"""Pages exported at once, between two steps."""
_MOST_STEPS = 64
"""Steps that fewer pages wait for more, so that a killed daemon loses little."""
_IDLE_WAIT_S = 0.05

Export = Callable[[Sequence[tuple[int, int]]], list[bytes]]


class PrefixReuse:
    """The prefix cache as requests see it: their tokens are its keys, their rows' tables its pages."""

    def __init__(self, prefix: PrefixCache, disk: DiskTier | None) -> None:
        """`disk`: prefixes that are not in memory are looked for there."""
        self.prefix = prefix
        self._disk = disk
        self._namespaces = Namespaces() if disk is None else disk.namespaces
        self._num_waited = 0

    def keep_tenants(self, weights: Mapping[str, float]) -> None:
        """These are the tenants from now on: nobody finds what others left, and it goes first."""
        try:
            self._namespaces.keep(weights.keys())
        except OSError as error:
            logger.warning("prefixes of tenants that are gone may be found after a restart: %s", error)
        self.prefix.weigh({self._namespaces[name]: weight for name, weight in weights.items()})

    def enter(self, request: Request, row: Row, token_s: float) -> None:
        """Have an entering row begin with what is known of its tokens, but for the last one.

        Args:
            token_s: seconds in which a token of prefill is computed; slower disks are not asked.
        """
        chain, most = self._chain_of(request)
        if self._disk is not None:
            self._load(self._disk, chain, most, token_s)
        num_pages = self.prefix.take(chain, row.tables, most)
        if self._disk is not None:
            self._disk.touch(self.prefix.used(chain, num_pages))
        marks = self.prefix.mark(chain, num_pages, most)
        row.num_reused = num_pages * self.prefix.page_size
        request.stops = tuple(mark * self.prefix.page_size for mark in marks if self.prefix.has_states)

    def num_kept(self, request: Request) -> int:
        """Positions that its row would begin with if it entered now, could all be loaded that is on disk."""
        chain, most = self._chain_of(request)
        stored = None if self._disk is None or self._disk.is_off else self._disk
        return self.prefix.find(chain, most, stored=stored) * self.prefix.page_size

    def _chain_of(self, request: Request) -> tuple[PageChain, int]:
        """The chain of its known tokens, and how many of their pages a row may begin with at most."""
        if request.chain is None:
            request.chain = self.prefix.chain(self._namespaces[request.tenant])
        return request.chain, self._extend(request.chain, request, request.num_known - 1)

    def _load(self, disk: DiskTier, chain: PageChain, most: int, token_s: float) -> None:
        """Bring pages into memory that let the row begin later than it could."""
        here = self.prefix.find(chain, most)
        goal = self.prefix.find(chain, most, stored=disk)
        names = self.prefix.missing(chain, goal) if goal > here else []
        for name in names:
            worth_s = token_s * self.prefix.page_size * (goal - here) / len(names)
            payload = disk.load(name, worth_s)
            if payload is None or not self.prefix.restore(chain, name, payload):
                return
        if goal < most:
            disk.count_absent()

    def record(self, request: Request, position: int) -> None:
        """The request is about to compute `position`: what its row holds here may be wanted by others."""
        chain, row = request.chain, request.row
        if chain is None or row is None:
            return
        if chain.marks or position // self.prefix.page_size > chain.latest:
            self._extend(chain, request, position)
            self.prefix.record(chain, row.tables, position)

    def share(self, request: Request) -> None:
        """Let later requests of its tenant begin with what its row has computed."""
        if request.chain is not None and request.row is not None:
            num_pages = self._extend(request.chain, request, request.num_settled)
            self.prefix.share(request.chain, request.row.tables, num_pages)

    def leave(self, request: Request) -> None:
        """Its row's tables are about to be cleared; what it has computed stays."""
        if request.chain is not None and request.row is not None:
            num_pages = self._extend(request.chain, request, request.num_settled)
            self.prefix.leave(request.chain, request.row.tables, num_pages, request.num_computed)

    def forget(self, request: Request) -> None:
        """The request's numbers went wrong: keep no page of it, nor of those it began with."""
        if request.chain is not None:
            keys = self.prefix.forget(request.chain)
            if self._disk is not None:
                self._disk.remove(keys)

    def clear(self) -> None:
        """Nobody may begin with a page that is in memory; what is on disk stays."""
        self.prefix.clear()

    def begin_step(self) -> None:
        if self._disk is not None:
            self._disk.begin_step()

    def save(self, export: Export, *, is_idle: bool) -> bool:
        """Hand some pages that are new in the prefix cache to the disk; whether more are left.

        Args:
            export: see Runner.export_pages; it waits for launched steps, so it is called for few pages only
                while idle.
            is_idle: there is nothing better to do than to wait for the disk, for a moment.
        """
        prefix, disk = self.prefix, self._disk
        if disk is None or not prefix.num_new:
            return False
        self._num_waited += 1
        if prefix.num_new < _MOST_SAVED and self._num_waited < _MOST_STEPS and not is_idle:
            return False
        self._num_waited = 0
        if disk.is_off:
            prefix.take_new(prefix.num_new)
            return False
        new = prefix.take_new(min(_MOST_SAVED, disk.room(_IDLE_WAIT_S if is_idle else 0.0)))
        missing = [(name, page) for name, page in new if name not in disk]
        if missing:
            payloads = export([(name.group, page) for name, page in missing])
            for (name, _), payload in zip(missing, payloads, strict=True):
                disk.save(name, payload)
        return prefix.num_new > 0

    @property
    def disk_stats(self) -> DiskStats | None:
        """None: there is no disk tier."""
        if self._disk is None:
            return None
        stats = self._disk.stats
        dropped = stats.pages["dropped"] + self.prefix.num_passed_over
        return replace(stats, pages=stats.pages | {"dropped": dropped})

    def _extend(self, chain: PageChain, request: Request, num_tokens: int) -> int:
        """Have keys for the full pages of the request's first `num_tokens` tokens; how many these are."""
        num_pages = num_tokens // self.prefix.page_size
        chain.extend(num_pages, self.prefix.page_size, request.tokens)
        return num_pages
