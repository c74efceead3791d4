"""One row's pages in one group."""

from collections.abc import Sequence

from mlxd.caches.page_pool import PagePool
from mlxd.caches.sizing import GroupSpec


class PageTable:
    """Physical page ids that hold one row's positions, oldest first.

    Logical page i holds positions [i * page_size, (i + 1) * page_size).

        [0, first_page)                      given back (a sliding window moved past them)
        [first_page, first_page + len(pages))  held

    In a speculative round (`hold` to `let_go`) pages that are given back stay the row's own, so that they can
    come back.

    Attributes:
        successor: the row's table in the group that takes it over, where one does.
    """

    __slots__ = ("_aside", "_pool", "first_page", "pages", "spec", "successor", "version")

    def __init__(self, spec: GroupSpec, pool: PagePool, successor: "PageTable | None" = None) -> None:
        self.spec = spec
        self.successor = successor
        self._pool = pool
        self._aside: list[int] | None = None
        self.pages: list[int] = []
        self.first_page = 0
        self.version = 0
        """Changes whenever `pages` or `first_page` do, so that device copies know when they are stale."""

    @property
    def start(self) -> int:
        """First position held."""
        return self.first_page * self.spec.page_size

    @property
    def end(self) -> int:
        """One past the last position that has room."""
        return (self.first_page + len(self.pages)) * self.spec.page_size

    @property
    def num_free(self) -> int:
        """Free pages of the pool it grows from."""
        return self._pool.num_free

    def page(self, index: int) -> int:
        """Id of the logical page `index`, which is held."""
        assert index >= self.first_page, f"page {index} was given back"
        return self.pages[index - self.first_page]

    def pages_short(self, end: int) -> int:
        """Pages to allocate before positions up to `end` (exclusive) have room."""
        end = self.spec.room_for(end)
        first_page = self.first_page if self.pages else max(self.first_page, self._entry_page)
        return max(0, -(-end // self.spec.page_size) - first_page - len(self.pages))

    @property
    def _entry_page(self) -> int:
        """The oldest page of a row that is taken over: what its window had left is not wanted."""
        return self.spec.first_live_page(self.spec.since) if self.spec.since else 0

    def adopt(self, pages: Sequence[int], first_page: int = 0) -> None:
        """Begin with full pages of another owner, shared by reference: never write to them.

        Args:
            first_page: logical index of the first one; those before it count as given back.
        """
        assert (self.pages, self.first_page) == ([], 0), "only an empty table adopts"
        for page in pages:
            self._pool.retain(page)
        self.pages = list(pages)
        self.first_page = first_page
        self.version += 1

    def grow(self, end: int) -> None:
        """Give positions up to `end` (exclusive) room.

        Raises:
            PoolExhaustedError: nothing was taken.
        """
        short = self.pages_short(end)
        if short:
            pages = self._pool.allocate(short)
            if not self.pages:
                self.first_page = max(self.first_page, self._entry_page)
            self.pages += pages
            self.version += 1

    def release_before(self, position: int) -> None:
        """Give back the pages that no query at `position` or later reads."""
        drop = min(self.spec.first_live_page(position) - self.first_page, len(self.pages))
        if drop > 0:
            if self._aside is None:
                self._pool.release(self.pages[:drop])
            else:
                self._aside += self.pages[:drop]
            del self.pages[:drop]
            self.first_page += drop
            self.version += 1

    def hold(self) -> None:
        """Until `let_go`, keep what `release_before` gives back at hand: no promise covers these pages."""
        if self._aside is None:
            self._aside = []

    def let_go(self, position: int) -> None:
        """End `hold`, if it is on: pages that a query at `position` reads come back, the others go."""
        aside, self._aside = self._aside, None
        if not aside:
            return
        first = max(self.spec.first_live_page(position), self.first_page - len(aside))
        gone = len(aside) - max(0, self.first_page - first)
        self._pool.release(aside[:gone])
        back = aside[gone:]
        if back:
            self.pages[:0] = back
            self.first_page -= len(back)
            self.version += 1

    def clear(self) -> None:
        """Give every page back and start at position 0 again."""
        self._pool.release([*(self._aside or ()), *self.pages])
        self._aside = None
        self.pages = []
        self.first_page = 0
        self.version += 1


def page_tables(specs: Sequence[GroupSpec], pools: Sequence[PagePool]) -> tuple[PageTable, ...]:
    """A new row's tables, one a group in the plan's order, each tied to its successor."""
    tables: dict[str, PageTable] = {}
    for spec, pool in reversed(list(zip(specs, pools, strict=True))):
        successor = None if spec.successor is None else tables[spec.successor]
        tables[spec.name] = PageTable(spec, pool, successor)
    return tuple(tables[spec.name] for spec in specs)
