"""How many pages and bytes a row of a given length needs, per layer group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

_STATE_STRIDE = 64
"""Positions between two boundaries of a model without pages, where the prefill chunk allows it."""

ENDLESS = 2**31 - 1
"""Page size of state that does not grow: its one page has room for every position."""


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers of one cache kind; they share page tables, so one page id names a page in each of them.

    Attributes:
        name: stable and readable, "full" or "sliding:512"; metric label and `mlxd check` row.
        layers: indexes into the model's cache list.
        window: None for full attention; else a position attends to itself and the `window - 1` before it.
        page_size: positions a page holds; ENDLESS for state that does not grow.
        bytes_per_token: bytes one more position of one row costs, K and V, over all `layers`.
        state_bytes: bytes of a row's state where it does not grow, over all `layers`: its one page.
        since, until: it serves positions [since, until) of a row (until None: to its end), whole pages.
            Its pages are there from the step that reaches `since`, and go back when `until` is reached.
        successor: name of the group, later in the plan, that takes the row over at `until`.
    """

    name: str
    layers: tuple[int, ...]
    window: int | None
    page_size: int
    bytes_per_token: int
    state_bytes: int = 0
    since: int = 0
    until: int | None = None
    successor: str | None = None

    @property
    def page_bytes(self) -> int:
        return self.state_bytes or self.page_size * self.bytes_per_token

    @property
    def is_bounded(self) -> bool:
        """Whether a row's part stops growing, however long it gets."""
        return self.window is not None or self.state_bytes > 0 or self.until is not None

    @property
    def forgets(self) -> bool:
        """Whether a row that goes on loses what it would need to be begun again where it was."""
        return self.window is not None or self.state_bytes > 0

    @property
    def gives_back(self) -> bool:
        """Whether a row that grows hands pages back."""
        return self.window is not None or self.until is not None

    @property
    def is_partial(self) -> bool:
        """Whether it serves only some of a row's positions."""
        return self.since > 0 or self.until is not None

    def serves(self, position: int) -> bool:
        """Whether a row that computes `position` writes it here, and reads the ones before it here."""
        return self.since <= position and (self.until is None or position < self.until)

    def room_for(self, end: int) -> int:
        """Positions that must have room once a row reaches `end` positions, those handed back included."""
        if end < self.since:
            return 0
        return end if self.until is None else min(end, self.until)

    def pages_for(self, num_tokens: int, chunk: int) -> int:
        """Most pages a row ever holds at once while it grows to `num_tokens`, prefilled `chunk` at a time.

        A sliding group holds the pages that touch the last `window` positions (at most
        ceil(window / page_size) + 1, since the window may begin inside a page) plus the chunk being written.
        """
        pages = _ceil_div(self.room_for(num_tokens), self.page_size)
        if self.window is None:
            return pages
        return min(pages, _ceil_div(self.window, self.page_size) + 1 + _ceil_div(chunk, self.page_size))

    def first_live_page(self, position: int) -> int:
        """Logical index of the oldest page that a query at `position` still reads."""
        if self.until is not None and position >= self.until:
            return self.until // self.page_size
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // self.page_size


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A group and the pages its pool gets, page 0 (scratch) not counted.

    Attributes:
        num_spare: those of them that no row is promised: the prefix cache keeps boundaries of rows there.
    """

    spec: GroupSpec
    num_pages: int
    num_spare: int = 0

    @property
    def num_promised(self) -> int:
        """Pages that rows may be promised."""
        return self.num_pages - self.num_spare

    @property
    def capacity_bytes(self) -> int:
        return self.num_pages * self.spec.page_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the daemon will hold: printed by `mlxd check`, followed by the pools and the ledger.

    Attributes:
        weights_bytes: the model's parameters as loaded.
        budget_bytes: what the configuration gives to KV.
        max_rows: rows the batch may hold.
        max_model_len: prompt plus generated positions a row may reach.
        chunk: prefill chunk in tokens.
    """

    weights_bytes: int
    budget_bytes: int
    max_rows: int
    max_model_len: int
    chunk: int
    groups: tuple[GroupPlan, ...]

    @property
    def boundary(self) -> int:
        """Positions that a row has when it is packed; 0 where none is packed on its way."""
        return max((group.spec.since for group in self.groups), default=0)

    @property
    def page_size(self) -> int:
        """Positions between two places where a row may begin on what others computed."""
        sizes = [group.spec.page_size for group in self.groups if not group.spec.state_bytes]
        return sizes[0] if sizes else gcd(self.chunk, _STATE_STRIDE)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all pools; never above `budget_bytes`. Each pool's scratch page comes on top."""
        return sum(group.capacity_bytes for group in self.groups)


def plan_memory(
    specs: tuple[GroupSpec, ...],
    *,
    budget_bytes: int,
    weights_bytes: int,
    max_rows: int,
    max_model_len: int,
    chunk: int,
    checkpoints: float = 0.0,
) -> MemoryPlan:
    """Share `budget_bytes` out between the groups' pools.

    A share `checkpoints` of the budget is set aside first: it gives windows and states spare pages, what as
    many boundaries need as it holds, since what rows leave behind in such a group is little and soon gone.

    Raises:
        ValueError: the budget does not hold one page of each group.
    """
    need = {s.name: s.pages_for(max_model_len, chunk) for s in specs}
    spare = _spare_pages(specs, int(budget_bytes * checkpoints), max_model_len)
    pages = _share_out(specs, need, budget_bytes - _bytes_of(specs, spare), max_rows)
    if pages is None:
        smallest = sum(s.page_bytes for s in specs)
        raise ValueError(
            f"a KV budget of {budget_bytes} bytes holds no page of each group ({smallest} bytes)"
        )
    return MemoryPlan(
        weights_bytes=weights_bytes,
        budget_bytes=budget_bytes,
        max_rows=max_rows,
        max_model_len=max_model_len,
        chunk=chunk,
        groups=tuple(GroupPlan(s, pages[s.name] + spare[s.name], spare[s.name]) for s in specs),
    )


def _bytes_of(specs: Sequence[GroupSpec], pages: Mapping[str, int]) -> int:
    return sum(pages[spec.name] * spec.page_bytes for spec in specs)


def _share_out(
    specs: Sequence[GroupSpec], need: Mapping[str, int], num_bytes: int, max_rows: int
) -> dict[str, int] | None:
    """Pages by group, at least one each; None where these do not fit.

    Bounded groups (sliding windows, state) come first, since a short row needs as much of them as a long one:
    they get what `max_rows` rows need, where that is at most half of the bytes; else what half of them gives,
    or their part of the rows of full length that fit, if that is more. Full-attention groups share the rest.
    No group gets more than `max_rows` rows of full length need.

    Args:
        need: pages of one row of full length, by group.
    """
    bounded = [s for s in specs if s.is_bounded]
    full = [s for s in specs if not s.is_bounded]
    bounded_bytes, full_bytes = _bytes_of(bounded, need), _bytes_of(full, need)
    pages: dict[str, int] = {}
    if bounded:
        rows = max(num_bytes / (bounded_bytes + full_bytes), num_bytes / 2 / bounded_bytes)
        pages = {s.name: max(1, int(min(rows, max_rows) * need[s.name])) for s in bounded}
    left = num_bytes - _bytes_of(bounded, pages)
    for spec in full:
        pages[spec.name] = min(left * need[spec.name] // full_bytes, max_rows * need[spec.name])
    return None if left < 0 or min(pages.values()) < 1 else pages


def _spare_pages(specs: Sequence[GroupSpec], num_bytes: int, max_model_len: int) -> dict[str, int]:
    """By group, what as many boundaries need as these bytes hold; groups that forget nothing need none."""
    pages = {s.name: s.pages_for(max_model_len, 0) if s.forgets else 0 for s in specs}
    boundary_bytes = _bytes_of(specs, pages)
    count = num_bytes // boundary_bytes if boundary_bytes else 0
    return {name: count * num_pages for name, num_pages in pages.items()}
