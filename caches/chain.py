"""One request's tokens as keys of full pages, and how far its row's boundaries are recorded."""

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b

from mlxd.caches.persistence import PageName

KEY_BYTES = 32


class PageChain:
    """Keys of a request's full pages, and what the prefix cache keeps of its row for the time being.

    A key is a hash of everything that decides what is in a page: the namespace, the tokens of all pages
    before and the page's own.

    Boundaries are counts of full pages. What a row needs to begin there is recorded when the row passes them,
    since later it is gone.

    Attributes:
        number: of this chain alone, in its cache.
        namespace: whose tokens they are.
        keys: of the first full pages, as far as `extend` was told.
        marks: boundaries to record for good, not passed yet.
        recorded: marks that were passed.
        latest: the boundary recorded last, of all that the row comes past.
        pending: per group, indexes of pages recorded that others must not find yet.
        is_spoiled: its numbers went wrong, or those it began with; none of its pages may be cached.
    """

    __slots__ = (
        "__weakref__",
        "_root",
        "is_spoiled",
        "keys",
        "latest",
        "marks",
        "namespace",
        "number",
        "pending",
        "recorded",
    )

    def __init__(self, number: int, namespace: str, root: bytes, num_groups: int) -> None:
        self.number = number
        self.namespace = namespace
        self._root = root
        self.keys: list[bytes] = []
        self.pending: tuple[set[int], ...] = tuple(set() for _ in range(num_groups))
        self.begin(0)

    def begin(self, num_pages: int) -> None:
        """A row begins after `num_pages` pages, whatever became of the row before it."""
        self.is_spoiled = False
        self.latest = num_pages
        self.marks: set[int] = set()
        self.recorded: set[int] = set()

    def extend(self, num_pages: int, page_size: int, tokens: Callable[[int, int], Sequence[int]]) -> None:
        """Have keys of `num_pages` pages; `tokens(start, end)` gives the tokens of these positions."""
        for index in range(len(self.keys), num_pages):
            before = self.keys[-1] if self.keys else self._root
            page = array("I", tokens(index * page_size, (index + 1) * page_size))
            self.keys.append(blake2b(before + page.tobytes(), digest_size=KEY_BYTES).digest())

    def name(self, index: int, group: int) -> PageName:
        return PageName(self.keys[index], self.keys[index - 1] if index else self._root, index, group)

    def private(self, index: int) -> tuple[int, int]:
        """The key of a page that others must not find yet."""
        return self.number, index

    def pass_boundaries(self, num_pages: int) -> list[int]:
        """Boundaries to record now that the row has so many full pages, `num_pages` last; often none."""
        passed = sorted(mark for mark in self.marks if mark <= num_pages)
        self.marks.difference_update(passed)
        self.recorded.update(passed)
        if num_pages > self.latest:
            self.latest = num_pages
            if num_pages not in self.recorded:
                passed.append(num_pages)
        return passed
