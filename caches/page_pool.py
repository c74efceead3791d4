"""Which pages of a group are free, held, or must be zeroed before their next owner."""

from collections import deque
from collections.abc import Iterable

SCRATCH_PAGE = 0
"""Idle rows of a bucket and padded positions write here; no row ever owns it."""

_SCRUB_BATCH = 64


class PoolExhaustedError(Exception):
    """No page is left: a bug where the ledger reserves the worst case, an answer under overcommit."""


class PagePool:
    """Reference counts and free lists of `num_pages` pages, ids 1..num_pages (0 is scratch).

    Host bookkeeping only: the arrays live with the runner. A released page is dirty: it holds another row's
    keys and values, and one non-finite number in it would poison whoever gets it, masked or not. Dirty pages
    are zeroed many at a time, when the clean ones run out, so a row that leaves costs nothing.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._clean: deque[int] = deque(range(1, num_pages + 1))
        self._dirty: deque[int] = deque()
        self._references = [0] * (num_pages + 1)
        self._to_scrub: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._clean) + len(self._dirty)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_free

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
        self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Give back one reference to each page; the last one frees it."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} released twice"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._dirty.append(page)

    def references(self, page: int) -> int:
        """Owners of a page; 0 where it is free."""
        return self._references[page]

    def scrub_dirty(self) -> None:
        """Have every dirty page zeroed now, not when clean ones run out."""
        self._to_scrub += self._dirty
        self._clean.extend(self._dirty)
        self._dirty.clear()

    def take_scrub(self) -> tuple[int, ...]:
        """Pages to zero before the next launch; each is reported once."""
        pages, self._to_scrub = tuple(self._to_scrub), []
        return pages

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is free once or held, and none is both."""
        free = [*self._clean, *self._dirty]
        assert len(set(free)) == len(free), "a page is free twice"
        assert all(self._references[page] == 0 for page in free), "a free page is referenced"
        held = sum(1 for count in self._references if count > 0)
        assert held + len(free) == self.num_pages, f"{held} held + {len(free)} free != {self.num_pages}"
        assert self._references[SCRATCH_PAGE] == 0, "the scratch page is owned"
