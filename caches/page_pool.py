"""Which pages of a group are free, held, or must be zeroed before their next owner."""

from collections import Counter, deque
from collections.abc import Iterable

from mlxd.caches.idle_pages import IdlePages

SCRATCH_PAGE = 0
"""Idle rows of a bucket and padded positions write here; no row ever owns it."""

_SCRUB_BATCH = 64

Origin = int | memoryview
"""What a page is filled from before the next launch: the page it is a copy of, or its bytes."""


class PoolExhaustedError(Exception):
    """No page is left: a bug where the ledger reserves the worst case, an answer under overcommit."""


class PagePool:
    """Reference counts and free lists of `num_pages` pages, ids 1..num_pages (0 is scratch).

    Host bookkeeping only: the arrays live with the runner. A released page is dirty: it holds another row's
    keys and values, and one non-finite number in it would poison whoever gets it, masked or not. Dirty pages
    are zeroed many at a time, when the clean ones run out, so a row that leaves costs nothing.

    One of a page's owners may be the prefix cache, which keeps it. A page that is kept and has no other owner
    is idle: held, but as good as free, since the cache gives it up as soon as it is wanted.

    Attributes:
        idle: pages that only the prefix cache owns, by namespace.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._clean: deque[int] = deque(range(1, num_pages + 1))
        self._dirty: deque[int] = deque()
        self._references = [0] * (num_pages + 1)
        self._to_scrub: list[int] = []
        self._origins: dict[int, Origin] = {}
        self._kept: dict[int, str] = {}
        self.idle = IdlePages()

    @property
    def num_free(self) -> int:
        return len(self._clean) + len(self._dirty)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_free

    @property
    def num_idle(self) -> int:
        """Pages that only the prefix cache owns."""
        return self.idle.total

    @property
    def num_used(self) -> int:
        """Pages that anybody but the prefix cache owns."""
        return self.num_held - self.num_idle

    @property
    def num_kept(self) -> int:
        """Pages that the prefix cache owns, alone or with others."""
        return len(self._kept)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, each with one reference.

        Raises:
            PoolExhaustedError: fewer are free; nothing was taken.
        """
        if count > self.num_free:
            raise PoolExhaustedError(f"{count} pages asked for, {self.num_free} of {self.num_pages} free")
        short = count - len(self._clean)
        if short > 0:
            batch = [self._dirty.popleft() for _ in range(min(len(self._dirty), max(short, _SCRUB_BATCH)))]
            self._to_scrub += batch
            self._clean.extend(batch)
        pages = [self._clean.popleft() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, page: int) -> None:
        """Share a held page with one more owner."""
        assert self._references[page] > 0, f"page {page} is free"
        if self.is_idle(page):
            self.idle.remove(self._kept[page])
        self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Give back one reference to each page; the last one frees it."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} released twice"
            self._references[page] -= 1
            if self.is_idle(page):
                self.idle.add(self._kept[page])
            elif self._references[page] == 0:
                assert page not in self._kept, f"page {page} is kept and has no owner"
                self._origins.pop(page, None)
                self._dirty.append(page)

    def keep(self, page: int, namespace: str) -> None:
        """Make the prefix cache an owner of a held page, once, for a namespace."""
        assert page not in self._kept, f"page {page} is kept twice"
        self.retain(page)
        self._kept[page] = namespace

    def drop(self, page: int) -> None:
        """The prefix cache is no owner any more."""
        if self.is_idle(page):
            self.idle.remove(self._kept[page])
        del self._kept[page]
        self.release((page,))

    def is_idle(self, page: int) -> bool:
        """Whether the prefix cache alone owns it."""
        return self._references[page] == 1 and page in self._kept

    def references(self, page: int) -> int:
        """Owners of a page; 0 where it is free."""
        return self._references[page]

    def scrub_dirty(self) -> None:
        """Have every dirty page zeroed now, not when clean ones run out."""
        self._to_scrub += self._dirty
        self._clean.extend(self._dirty)
        self._dirty.clear()

    def origin(self, page: int) -> Origin:
        """Where a page's content is until the next launch: elsewhere where it is yet to be filled."""
        return self._origins.get(page, page)

    def fill(self, page: int, origin: Origin) -> None:
        """Have a held page filled before the next launch; forgotten where it is freed before.

        All origins are read before any page is written or zeroed, so an origin may be free already.
        """
        self._origins[page] = origin

    def take_scrub(self) -> tuple[int, ...]:
        """Pages to zero before the next launch; each is reported once, and none that is filled."""
        pages = tuple(page for page in self._to_scrub if page not in self._origins)
        self._to_scrub = []
        return pages

    def take_origins(self) -> dict[int, Origin]:
        """Pages to fill before the next launch, and from where; asked for after `take_scrub`, once."""
        origins, self._origins = self._origins, {}
        return origins

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is free once or held, and none is both."""
        free = [*self._clean, *self._dirty]
        assert len(set(free)) == len(free), "a page is free twice"
        assert not any(map(self._references.__getitem__, free)), "a free page is referenced"
        assert self._references[SCRATCH_PAGE] == 0, "the scratch page is owned"
        held = self.num_pages + 1 - self._references.count(0)
        assert held + len(free) == self.num_pages, f"{held} held + {len(free)} free != {self.num_pages}"
        idle = Counter(namespace for page, namespace in self._kept.items() if self.is_idle(page))
        assert self.idle.counts == idle, f"{self.idle.counts} idle pages are counted, not {idle}"
        assert self.idle.total == idle.total(), f"{self.idle.total} idle pages are counted in all"
        assert all(self._references[page] for page in (*self._kept, *self._origins)), "a free page is awaited"
