"""One group's pages that the prefix cache keeps, by what is in them."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mlxd.caches.chain import PageChain
from mlxd.caches.page_pool import Origin, PagePool
from mlxd.caches.page_table import PageTable
from mlxd.caches.sizing import GroupSpec

Key = bytes | tuple[int, int]
"""What a page is found by: the hash of all tokens up to its end. Until its numbers are known to be right: its
row's chain, by number, and its index there; so only that row knows it."""


class KeptPage(NamedTuple):
    """`first`: key of the first page of the chain that it is part of."""

    page: int
    first: bytes
    namespace: str


class KeptPages:
    """Pages by key, and the order in which each namespace gives up its own; which one does, the pool knows.

    A group of growing pages keeps each one under the key of its end; a group of states keeps a state under
    the key of the last page that went into it.

    Attributes:
        num_evicted: pages given up because others were wanted.
    """

    def __init__(self, spec: GroupSpec, pool: PagePool, page_size: int) -> None:
        """`page_size`: positions between two keys."""
        self.spec = spec
        self.num_evicted = 0
        self._pool = pool
        self._page_size = page_size
        self._kept: dict[Key, KeptPage] = {}
        self._orders: dict[str, OrderedDict[Key, None]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def page(self, key: Key) -> int | None:
        """The page under `key`; None: there is none, or it is yet to be filled."""
        kept = self._kept.get(key)
        return kept.page if kept is not None and self._pool.origin(kept.page) == kept.page else None

    @property
    def wants_all(self) -> bool:
        """Whether a row wants every page from the first on, where the group serves it."""
        return self.spec.window is None and not self.has_states

    @property
    def serves_all(self) -> bool:
        """Whether the group serves a row wherever it begins."""
        return not self.spec.is_partial

    @property
    def has_states(self) -> bool:
        return self.spec.state_bytes > 0

    def wanted(self, num_pages: int) -> range:
        """Indexes of the pages that a row has to find to begin after its first `num_pages`."""
        position = num_pages * self._page_size
        if not self.spec.serves(position):
            return range(0)
        first = num_pages - 1 if self.has_states else self.spec.first_live_page(position)
        return range(max(0, first), num_pages)

    def wanted_by(self, boundaries: Iterable[int]) -> set[int]:
        """As `wanted`, of several."""
        return {index for num_pages in boundaries for index in self.wanted(num_pages)}

    def weigh(self, weights: Mapping[str, float]) -> None:
        """See IdlePages.weigh."""
        self._pool.idle.weigh(weights)

    def lend(self, keys: Sequence[bytes], num_pages: int, table: PageTable) -> None:
        """Have an empty table begin after `num_pages` pages, all that it wants being there."""
        wanted = self.wanted(num_pages)
        pages = [self._kept[keys[index]].page for index in wanted]
        self.touch(keys[index] for index in reversed(wanted))
        if not self.has_states:
            table.adopt(pages, self.spec.first_live_page(num_pages * self._page_size))
        elif pages:
            origin = self._pool.origin(pages[0])
            self.evict(table.pages_short(1) - self._pool.num_free)
            table.grow(1)
            self._pool.fill(table.pages[0], origin)

    def keep(self, key: Key, chain: PageChain, page: int) -> None:
        """Keep a page of a chain that somebody holds, as the last one that its namespace gives up."""
        self._pool.keep(page, chain.namespace)
        self._insert(key, KeptPage(page, chain.keys[0], chain.namespace))

    def keep_copy(self, key: Key, chain: PageChain, origin: Origin) -> bool:
        """Keep a page filled from `origin`; False: that would have taken one from a row."""
        self.evict(1 - self._pool.num_free)
        if not self._pool.num_free:
            return False
        [page] = self._pool.allocate(1)
        self.keep(key, chain, page)
        self._pool.release((page,))
        self._pool.fill(page, origin)
        return True

    def rename(self, old: Key, new: Key) -> bool:
        """Whether there was one under `old`, and none under `new`; `old` is gone in any case."""
        kept = self._pop(old)
        if kept is None:
            return False
        if new in self._kept:
            self._pool.drop(kept.page)
            return False
        self._insert(new, kept)
        return True

    def touch(self, keys: Iterable[Key]) -> None:
        """These were used, the last one latest."""
        for key in keys:
            if (kept := self._kept.get(key)) is not None:
                self._orders[kept.namespace].move_to_end(key)

    def rank(self, key: Key, *, is_first: bool) -> None:
        """Give it up before or after all others of its namespace."""
        if (kept := self._kept.get(key)) is not None:
            self._orders[kept.namespace].move_to_end(key, last=not is_first)

    def drop(self, key: Key) -> None:
        if (kept := self._pop(key)) is not None:
            self._pool.drop(kept.page)

    def drop_all(self, first: bytes) -> list[Key]:
        """Drop every page of the chains that begin with this one; their keys."""
        keys = [key for key, kept in self._kept.items() if kept.first == first]
        for key in keys:
            self.drop(key)
        return keys

    def clear(self) -> None:
        """Drop every page."""
        for key in list(self._kept):
            self.drop(key)

    def evict(self, count: int) -> None:
        """Free up to `count` pages that no row holds."""
        for _ in range(min(count, self._pool.num_idle)):
            order = self._orders[self._pool.idle.largest]
            key = next(iter(order))
            while not self._pool.is_idle(self._kept[key].page):
                order.move_to_end(key)  # rows hold it, so it is in use now
                key = next(iter(order))
            self.drop(key)
            self.num_evicted += 1

    def _insert(self, key: Key, kept: KeptPage) -> None:
        self._kept[key] = kept
        self._orders.setdefault(kept.namespace, OrderedDict())[key] = None

    def _pop(self, key: Key) -> KeptPage | None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            order = self._orders[kept.namespace]
            del order[key]
            if not order:
                del self._orders[kept.namespace]
        return kept

    def check_integrity(self) -> None:
        """Raises AssertionError unless the pool knows of the same pages."""
        pages = {kept.page for kept in self._kept.values()}
        assert len(pages) == len(self._kept) == self._pool.num_kept, "a page is kept by nobody, or twice"
        assert all(self._pool.references(page) for page in pages), "a free page is kept"
        ordered = {key: namespace for namespace, order in self._orders.items() for key in order}
        assert ordered == {key: kept.namespace for key, kept in self._kept.items()}, "a page is in no order"
