"""What rows computed, kept after them and found again by the tokens that led to it."""

from collections import OrderedDict, deque
from collections.abc import Container, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import count
from weakref import WeakSet

from mlxd.caches.chain import KEY_BYTES, PageChain
from mlxd.caches.kept_pages import KeptPages
from mlxd.caches.page_pool import PagePool
from mlxd.caches.page_table import PageTable
from mlxd.caches.persistence import PageName
from mlxd.caches.sizing import GroupSpec

_MOST_SEEN = 2**16


class PrefixCache:
    """Pages by key, group by group. Those that no row holds are given up as pages run out.

    A row may begin after n full pages where each group has what a row there reads: all n pages, those in its
    window, its state, or nothing, if the group does not serve that position. Each page goes for itself, from
    the namespace that keeps most for its weight, there the least recently used first; a chain's last page
    counts as used before the one it follows.

    Full pages stay in their row to its end. What a window leaves behind, and a state, is recorded when the
    row passes a boundary: by reference, since full pages are never written again; a state as a copy. Nobody
    but its row knows of it until `share` or `leave` say that the numbers up to it are right.

    Attributes:
        groups: what is kept, by group.
        has_states: whether a group holds states; then rows stop at boundaries to be recorded.
        has_boundaries: whether there is anything to record.
        num_passed_over: pages that came in and that `take_new` never told.
    """

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        pools: Sequence[PagePool],
        page_size: int,
        identity: str,
        secret: bytes,
        *,
        most_new: int = 0,
    ) -> None:
        """
        Args:
            specs, pools: one a group.
            identity: names the model and its storage; what differs in it shares nothing.
            secret: at most 64 bytes; keys cannot be foreseen without it.
            most_new: pages remembered until `take_new` tells them, the latest ones.
        """
        self.page_size = page_size
        self.groups = tuple(KeptPages(spec, pool, page_size) for spec, pool in zip(specs, pools, strict=True))
        self.has_states = any(kept.has_states for kept in self.groups)
        self.has_boundaries = any(kept.spec.is_bounded for kept in self.groups)
        self.num_passed_over = 0
        self._identity = identity
        self._secret = secret
        self._numbers = count()
        self._chains: WeakSet[PageChain] = WeakSet()
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._new: deque[PageName] = deque(maxlen=most_new)

    @property
    def num_new(self) -> int:
        """Pages that `take_new` has not told yet; some may be gone already."""
        return len(self._new)

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Weights of the namespaces from now on; what others kept is given up first."""
        for kept in self.groups:
            kept.weigh(weights)

    def chain(self, namespace: str) -> PageChain:
        """For a new request; chains of different namespaces never share a key."""
        text = f"{len(namespace)}:{namespace}{self._identity}".encode()
        root = blake2b(text, key=self._secret, digest_size=KEY_BYTES).digest()
        chain = PageChain(next(self._numbers), namespace, root, len(self.groups))
        self._chains.add(chain)
        return chain

    def find(self, chain: PageChain, most: int, *, stored: Container[PageName] | None = None) -> int:
        """After how many of its first `most` pages a row may begin; the most there are.

        Args:
            stored: pages that could be had, besides those that are here.
        """

        def lacks(group: int, index: int) -> bool:
            here = chain.keys[index] in self.groups[group]
            return not here and (stored is None or chain.name(index, group) not in stored)

        def runs_to(group: int) -> int:
            return next((index for index in range(most) if lacks(group, index)), most)

        def is_served(group: int, num_pages: int) -> bool:
            wanted = self.groups[group].wanted(num_pages)
            if group in runs:
                return not wanted or num_pages <= runs[group]
            return not any(lacks(group, index) for index in reversed(wanted))

        groups = range(len(self.groups))
        runs = {group: runs_to(group) for group in groups if self.groups[group].wants_all}
        limit = min((runs[group] for group in runs if self.groups[group].serves_all), default=most)
        counts = range(limit, 0, -1)
        return next((n for n in counts if all(is_served(group, n) for group in groups)), 0)

    def missing(self, chain: PageChain, num_pages: int) -> list[PageName]:
        """What is not here of what a row wants to begin after `num_pages` pages; what is counts as used.

        Bounded groups come first: without theirs the others' pages are of no use.
        """
        names: list[PageName] = []
        order = sorted(range(len(self.groups)), key=lambda group: not self.groups[group].spec.is_bounded)
        for group in order:
            kept, wanted = self.groups[group], self.groups[group].wanted(num_pages)
            names += [chain.name(i, group) for i in wanted if chain.keys[i] not in kept]
            kept.touch(chain.keys[index] for index in reversed(wanted))
        return names

    def restore(self, chain: PageChain, name: PageName, payload: memoryview) -> bool:
        """Keep a page that comes from elsewhere, filled before the next launch; False: there is no room."""
        return self.groups[name.group].keep_copy(name.key, chain, payload)

    def take(self, chain: PageChain, tables: Sequence[PageTable], most: int) -> int:
        """Have the empty tables of a row that enters begin with what `find` finds; how many pages that is.

        Its own state is copied there before the next launch.
        """
        num_pages = self.find(chain, most)
        chain.begin(num_pages)
        for kept, table in zip(self.groups, tables, strict=True):
            if num_pages:
                kept.lend(chain.keys, num_pages, table)
        return num_pages

    def used(self, chain: PageChain, num_pages: int) -> Iterator[PageName]:
        """What a row that begins after `num_pages` pages uses, each chain's end before its beginning."""
        for group, kept in enumerate(self.groups):
            for index in reversed(kept.wanted(num_pages) if num_pages else range(0)):
                yield chain.name(index, group)

    def mark(self, chain: PageChain, num_pages: int, most: int) -> tuple[int, ...]:
        """Choose the boundaries that a row which begins after `num_pages` pages records for good.

        These are the last one that it may ever be asked for again, `most`, and where it leaves what was
        seen before: others that came so far will part with it there.
        """
        if not self.has_boundaries:
            return ()
        keys = chain.keys[:most]
        branch = max((index + 1 for index, key in enumerate(keys) if key in self._seen), default=0)
        chain.marks = {mark for mark in (branch, most) if mark > num_pages}
        self._remember(keys)
        return tuple(sorted(chain.marks))

    def record(
        self, chain: PageChain, tables: Sequence[PageTable], position: int, *, is_leaving: bool = False
    ) -> None:
        """A row has computed what is before `position`: keep what one that begins at a boundary here reads.

        The chain has keys of all full pages before. A state is there to be had only at the boundary itself.

        Args:
            is_leaving: the row goes no further, so its state is kept and not a copy of it.
        """
        num_pages, rest = divmod(position, self.page_size)
        if chain.is_spoiled or (self.has_states and rest):
            return
        passed = chain.pass_boundaries(num_pages)
        if not passed:
            return
        for kept, table, pending in zip(self.groups, tables, chain.pending, strict=True):
            if kept.spec.is_bounded:
                lasting = kept.wanted_by(chain.recorded)
                for index in pending - lasting - kept.wanted_by([chain.latest]):
                    pending.remove(index)
                    kept.drop(chain.private(index))
                for index in sorted(kept.wanted_by(passed), reverse=True):
                    self._record_page(kept, chain, table, index, is_leaving)
                    pending.add(index)
                    kept.rank(chain.private(index), is_first=index not in lasting)

    def _record_page(
        self, kept: KeptPages, chain: PageChain, table: PageTable, index: int, is_leaving: bool
    ) -> None:
        key = chain.private(index)
        if key in kept or chain.keys[index] in kept:
            return
        if kept.has_states and not is_leaving:
            kept.keep_copy(key, chain, table.pages[0])
        else:
            kept.keep(key, chain, table.pages[0] if kept.has_states else table.page(index))

    def share(self, chain: PageChain, tables: Sequence[PageTable], num_pages: int) -> None:
        """Let others find what a row computed of its first `num_pages` pages, never to be written again."""
        if chain.is_spoiled:
            return
        for group, (kept, table) in enumerate(zip(self.groups, tables, strict=True)):
            pending = chain.pending[group]
            settled = [index for index in pending if index < num_pages]
            pending.difference_update(settled)
            shared = [i for i in settled if kept.rename(chain.private(i), chain.keys[i])]
            for index in reversed(self._full_pages(kept, table, num_pages)):
                if chain.keys[index] not in kept:
                    kept.keep(chain.keys[index], chain, table.page(index))
                    shared.append(index)
            kept.touch(chain.keys[index] for index in sorted(shared, reverse=True))
            for index in sorted(shared):
                self._tell_new(chain.name(index, group))

    def _full_pages(self, kept: KeptPages, table: PageTable, num_pages: int) -> range:
        """Indexes of a table's pages that are full and final, of a row with `num_pages` of them."""
        if kept.has_states or num_pages * self.page_size < kept.spec.since:
            return range(0)
        return range(table.first_page, min(num_pages, table.first_page + len(table.pages)))

    def leave(self, chain: PageChain, tables: Sequence[PageTable], num_pages: int, position: int) -> None:
        """A row goes, its tables are about to be cleared: what it has shared or shares now was used last.

        Args:
            num_pages: how many of its pages are full and settled.
            position: where it would have gone on.
        """
        if self.has_boundaries and position == num_pages * self.page_size:
            self.record(chain, tables, position, is_leaving=True)
        self.share(chain, tables, num_pages)
        if self.has_boundaries:
            self._remember(chain.keys[:num_pages])
        for kept, table, pending in zip(self.groups, tables, chain.pending, strict=True):
            for index in pending:
                kept.drop(chain.private(index))
            pending.clear()
            kept.touch(chain.keys[index] for index in reversed(self._full_pages(kept, table, num_pages)))

    def forget(self, chain: PageChain) -> list[bytes]:
        """Drop all that begins with the chain's first page: something in there is wrong.

        Rows that began so, too, go on, but nothing more of them is kept.

        Returns:
            The keys of all that may be wrong.
        """
        chain.is_spoiled = True
        if not chain.keys:
            return []
        first = chain.keys[0]
        for other in self._chains:
            if other.keys[:1] == [first]:
                other.is_spoiled = True
        dropped = [key for kept in self.groups for key in kept.drop_all(first)]
        return list(dict.fromkeys([*chain.keys, *(key for key in dropped if isinstance(key, bytes))]))

    def clear(self) -> None:
        """Drop every page: what is in them is not known. Rows that run go on and share nothing more."""
        for chain in self._chains:
            chain.is_spoiled = True
        for kept in self.groups:
            kept.clear()
        self._new.clear()

    def take_new(self, most: int) -> list[tuple[PageName, int]]:
        """Up to `most` pages that came in since, oldest first, but for those gone: name and page id."""
        names = [self._new.popleft() for _ in range(min(most, len(self._new)))]
        pages = [self.groups[name.group].page(name.key) for name in names]
        return [(name, page) for name, page in zip(names, pages, strict=True) if page is not None]

    def _tell_new(self, name: PageName) -> None:
        self.num_passed_over += len(self._new) == self._new.maxlen
        self._new.append(name)

    def _remember(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)
