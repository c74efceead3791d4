"""Full pages that outlive their rows, found again by the tokens that led to them."""

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from mlxd.caches.page_pool import PagePool
from mlxd.caches.page_table import PageTable
from mlxd.caches.persistence import PageName
from mlxd.caches.sizing import GroupSpec

_KEY_BYTES = 32


def why_not_reusable(specs: Sequence[GroupSpec]) -> str:
    """What keeps rows of these groups from starting on pages of others; empty where nothing does."""
    if any(spec.state_bytes for spec in specs):
        return "recurrent state is not reusable"
    if any(spec.window is not None for spec in specs):
        return "sliding windows are not reusable"
    if any(spec.is_partial for spec in specs):
        return "rows that are packed on their way are not reusable"
    if len({spec.page_size for spec in specs}) > 1:
        return "groups differ in page size"
    return ""


@dataclass(slots=True, eq=False)
class PrefixEntry:
    """One full page of each group, after those of `parent`; the cache holds one reference to each.

    Attributes:
        users: rows whose tables hold these pages.
        is_forgotten: no longer in the cache; rows that hold it go on with its pages.
    """

    name: PageName
    parent: "PrefixEntry | None"
    pages: tuple[int, ...]
    users: int = 0
    children: set["PrefixEntry"] = field(default_factory=set)
    is_forgotten: bool = False

    @property
    def key(self) -> bytes:
        return self.name.key


class PageChain:
    """One request's tokens as keys of full pages; the cache's entries its row holds.

    A key is a hash of everything that decides what is in a page: the namespace, the tokens of all pages
    before and the page's own.

    Attributes:
        keys: of the first full pages, as far as `extend` was told.
        entries: those whose pages the row's tables begin with; none where there is no row.
        is_spoiled: its numbers went wrong; none of its pages may be cached.
    """

    __slots__ = ("_root", "entries", "is_spoiled", "keys")

    def __init__(self, root: bytes) -> None:
        self._root = root
        self.keys: list[bytes] = []
        self.entries: list[PrefixEntry] = []
        self.is_spoiled = False

    @property
    def can_grow(self) -> bool:
        """Whether more of its pages may be cached: what they would hang on is not forgotten."""
        return not self.is_spoiled and not (self.entries and self.entries[-1].is_forgotten)

    def extend(self, num_pages: int, page_size: int, tokens: Callable[[int, int], Sequence[int]]) -> None:
        """Have keys of `num_pages` pages; `tokens(start, end)` gives the tokens of these positions."""
        for index in range(len(self.keys), num_pages):
            before = self.keys[-1] if self.keys else self._root
            page = array("I", tokens(index * page_size, (index + 1) * page_size))
            self.keys.append(blake2b(before + page.tobytes(), digest_size=_KEY_BYTES).digest())

    def name(self, index: int) -> PageName:
        return PageName(self.keys[index], self.keys[index - 1] if index else self._root, index)


class PrefixCache:
    """Pages by key. Entries that no row uses are given up, the least recently used first, as pages run out.

    Shared pages are full and are never written again, so nothing is copied. A row holds its entries from the
    first on without a gap, and a row that leaves marks its deepest entry as used first: so among unused
    entries each one is given up before the one it hangs on.

    Attributes:
        num_evicted: entries given up for their pages since the start.
        num_passed_over: entries that came in and that `take_new` never told.
    """

    def __init__(
        self, pools: Sequence[PagePool], page_size: int, identity: str, secret: bytes, *, most_new: int = 0
    ) -> None:
        """
        Args:
            pools: one a group.
            identity: names the model and its storage; what differs in it shares nothing.
            secret: at most 64 bytes; keys cannot be foreseen without it.
            most_new: entries remembered until `take_new` tells them, the latest ones.
        """
        self.page_size = page_size
        self.num_evicted = 0
        self._pools = tuple(pools)
        self._identity = identity
        self._secret = secret
        self._entries: dict[bytes, PrefixEntry] = {}
        self._unused: OrderedDict[bytes, PrefixEntry] = OrderedDict()
        self._new: deque[PrefixEntry] = deque(maxlen=most_new)
        self.num_passed_over = 0

    @property
    def num_new(self) -> int:
        """Entries that `take_new` has not told yet; some may be gone already."""
        return len(self._new)

    @property
    def num_unused(self) -> int:
        """Pages of each group that belong to no row: free space in all but name."""
        return len(self._unused)

    def chain(self, namespace: str) -> PageChain:
        """For a new request; chains of different namespaces never share a key."""
        text = f"{len(namespace)}:{namespace}{self._identity}".encode()
        return PageChain(blake2b(text, key=self._secret, digest_size=_KEY_BYTES).digest())

    def take(self, chain: PageChain, most: int) -> list[tuple[int, ...]]:
        """Hold the longest cached run of the chain's first `most` pages for a row that enters.

        Returns:
            One tuple a position, one page a group; the row's tables have to adopt them.
        """
        assert not chain.entries, "a row that enters holds entries already"
        for key in chain.keys[:most]:
            entry = self._entries.get(key)
            if entry is None:
                break
            entry.users += 1
            self._unused.pop(key, None)
            chain.entries.append(entry)
        return [entry.pages for entry in chain.entries]

    def share(
        self, chain: PageChain, tables: Sequence[PageTable], num_pages: int, *, is_new: bool = True
    ) -> None:
        """Let others find a row's first `num_pages` pages, which must never be written again.

        Ends at a page that another row put there first: an entry held without its pages in this row's tables
        would be memory that nobody promised. `leave` tells what comes after it.

        Args:
            is_new: whether `take_new` is to tell them.
        """
        if not chain.can_grow:
            return
        for index in range(len(chain.entries), num_pages):
            if chain.keys[index] in self._entries:
                return
            entry = self._add(chain, index, chain.entries[-1] if chain.entries else None, tables)
            if is_new:
                self._tell_new(entry)
            entry.users = 1
            chain.entries.append(entry)

    def leave(self, chain: PageChain, tables: Sequence[PageTable], num_pages: int) -> None:
        """A row goes, its tables are about to be cleared: its first `num_pages` pages stay as latest used."""
        path = list(chain.entries)
        if chain.can_grow:
            for index in range(len(path), num_pages):
                known = self._entries.get(chain.keys[index])
                if known is None:
                    known = self._add(chain, index, path[-1] if path else None, tables)
                    self._tell_new(known)
                path.append(known)
        for entry in chain.entries:
            entry.users -= 1
        chain.entries.clear()
        for entry in reversed(path):
            if entry.users == 0 and not entry.is_forgotten:
                self._unused[entry.key] = entry
                self._unused.move_to_end(entry.key)

    def forget(self, chain: PageChain) -> list[bytes]:
        """Drop the chain's cached pages and all that hang on its first: something in there is wrong.

        Returns:
            The keys of all that may be wrong.
        """
        chain.is_spoiled = True
        keys = list(chain.keys)
        first = self._entries.get(chain.keys[0]) if chain.keys else None
        doomed = [] if first is None else [first]
        while doomed:
            entry = doomed.pop()
            doomed += entry.children
            keys.append(entry.key)
            self._remove(entry)
        return keys

    def evict(self, count: int) -> None:
        """Free up to `count` pages in each group."""
        for _ in range(min(count, len(self._unused))):
            entry = next(iter(self._unused.values()))
            assert not entry.children, "an entry is given up before one that hangs on it"
            self._remove(entry)
            self.num_evicted += 1

    def take_new(self, most: int) -> list[tuple[PageName, tuple[int, ...]]]:
        """Names and pages of up to `most` entries that came in since, oldest first, but for those gone."""
        entries = [self._new.popleft() for _ in range(min(most, len(self._new)))]
        return [(entry.name, entry.pages) for entry in entries if not entry.is_forgotten]

    def _add(
        self, chain: PageChain, index: int, parent: PrefixEntry | None, tables: Sequence[PageTable]
    ) -> PrefixEntry:
        entry = PrefixEntry(chain.name(index), parent, tuple(table.pages[index] for table in tables))
        for pool, page in zip(self._pools, entry.pages, strict=True):
            pool.retain(page)
        if parent is not None:
            parent.children.add(entry)
        self._entries[entry.key] = entry
        return entry

    def _tell_new(self, entry: PrefixEntry) -> None:
        self.num_passed_over += len(self._new) == self._new.maxlen
        self._new.append(entry)

    def _remove(self, entry: PrefixEntry) -> None:
        del self._entries[entry.key]
        self._unused.pop(entry.key, None)
        if entry.parent is not None:
            entry.parent.children.discard(entry)
        entry.is_forgotten = True
        for pool, page in zip(self._pools, entry.pages, strict=True):
            pool.release((page,))

    def check_integrity(self) -> None:
        """Raises AssertionError unless entries, their order and their pages' references agree."""
        seen: set[bytes] = set()
        for key, entry in self._unused.items():
            assert self._entries.get(key) is entry, "an unused entry is not in the cache"
            assert entry.users == 0, "a used entry may be evicted"
            assert all(child.key in seen for child in entry.children), "an entry goes before its child"
            seen.add(key)
        for key, entry in self._entries.items():
            assert (entry.users == 0) == (key in seen), f"an entry of {entry.users} users is lost"
            assert entry.parent is None or self._entries.get(entry.parent.key) is entry.parent, "no parent"
            for pool, page in zip(self._pools, entry.pages, strict=True):
                held = pool.references(page)
                assert held == 1 + entry.users, f"page {page}: {held} references, {entry.users} users"
