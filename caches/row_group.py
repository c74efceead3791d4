"""The rows that a step sees in one group: their tables and where each one's next position goes."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from mlxd.caches.contract import DecodeSlot
from mlxd.caches.page_pool import SCRATCH_PAGE
from mlxd.caches.page_table import PageTable
from mlxd.caches.sizing import GroupPlan, GroupSpec

_IntArray = npt.NDArray[np.int32]


def width_bucket(num_pages: int) -> int:
    """Smallest of 1, 2, 3, 4, 6, 8, 12, 16, ... that is not below `num_pages`: at most a third is padding."""
    size = 1
    while size < num_pages:
        if size % 2 == 0 and num_pages <= size + size // 2:
            return size + size // 2
        size *= 2
    return size


def row_bucket(num_rows: int) -> int:
    """Smallest power of two that is not below `num_rows`."""
    return 1 << (num_rows - 1).bit_length()


class RowGroup:
    """Rows bound for the coming step, shared by all layers of a group.

    Host mirrors of what the step gets as arrays. Layers check and advance through it, so that one count
    serves them all. Rows beyond the bound ones are idle: their table is the scratch page and their position
    0. So is the table of a bound row whose position the group does not serve.

    Attributes:
        width: columns of `table`; 0 where the group serves no row of the step.
    """

    def __init__(self, spec: GroupSpec, num_pages: int = 0, successor: "RowGroup | None" = None) -> None:
        """
        Args:
            num_pages: of the group's pools, scratch not counted.
            successor: the group that takes its rows over, where one does.
        """
        self.spec = spec
        self.num_pages = num_pages
        self.successor = successor
        self.tables: tuple[PageTable, ...] = ()
        self.offsets: tuple[int, ...] = ()
        self.num_rows = 0
        self.width = 1
        self.changed = True
        """Whether `table` or `start` differ from what the device copies were made of; the step resets it."""
        self._stamp: tuple[object, ...] = ()
        self._advanced: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        self._slots: dict[str, DecodeSlot] = {}
        self._table = np.zeros((0, 1), np.int32)
        self._start = np.zeros((0,), np.int32)

    def bind(
        self, tables: Sequence[PageTable], offsets: Sequence[int], num_rows: int, *, exact: bool = False
    ) -> None:
        """Take these rows and the position each one writes next; `num_rows` counts idle ones too.

        Args:
            exact: make the table as wide as the widest row, not as its bucket: for eager steps.

        Raises:
            IndexError: a row has no room for its position. Device writes check no bounds.
        """
        serves = [self.spec.serves(offset) for offset in offsets]
        for table, offset, is_served in zip(tables, offsets, serves, strict=True):
            if is_served and not table.start <= offset < table.end:
                raise IndexError(f"position {offset} is outside the pages held, [{table.start}, {table.end})")
        self.tables, self.offsets = tuple(tables), tuple(offsets)
        stamp = (num_rows, exact, *((id(table), table.version) for table in tables), *serves)
        if stamp != self._stamp:
            self._stamp = stamp
            served = {i: table for i, table in enumerate(tables) if serves[i]}
            none = 0 if self.spec.is_partial else 1
            widest = max((len(table.pages) for table in served.values()), default=none)
            self._lay_out(num_rows, widest if exact or not widest else width_bucket(widest), served)

    def bind_idle(self, num_rows: int, width: int, num_pages: int) -> int:
        """A step of idle rows, to trace a graph or to time it.

        It reads pages 1..num_pages as full rows would, and writes to the scratch page.

        Args:
            width: 0 where the group is to serve no row.
        Returns:
            The position that all rows write; a larger one will do if the tables are moved by `shift_idle`.
        """
        self.tables, self.offsets = (), ()
        self._stamp = ()
        self._lay_out(num_rows, width, {})
        if self.spec.state_bytes or not width:
            return 0
        cells = np.arange(num_rows * (width - 1), dtype=np.int32) % num_pages + 1
        self._table[:, :-1] = cells.reshape(num_rows, width - 1)
        return width * self.spec.page_size - 1

    def shift_idle(self, position: int) -> None:
        """Let idle rows write `position`: their tables then hold the positions just up to it."""
        if not self.spec.state_bytes:
            self._start[:] = position + 1 - self.width * self.spec.page_size

    def _lay_out(self, num_rows: int, width: int, served: Mapping[int, PageTable]) -> None:
        self.num_rows, self.width, self.changed = num_rows, width, True
        self._table = np.full((num_rows, width), SCRATCH_PAGE, np.int32)
        self._start = np.zeros((num_rows,), np.int32)
        for i, table in served.items():
            held = len(table.pages)
            self._table[i, :held] = table.pages
            self._table[i, held:] = table.pages[-1]
            self._start[i] = table.start

    def advanced(self, offsets: tuple[int, ...]) -> tuple[int, ...]:
        """`offsets`, each one further; layers that pass the same tuple get the same tuple back."""
        if self._advanced[0] is not offsets:
            self._advanced = (offsets, tuple(offset + 1 for offset in offsets))
        return self._advanced[1]

    def slot(self, signature: str, make: Callable[[], DecodeSlot]) -> DecodeSlot:
        """The one slot that all layers of this group and signature share."""
        if signature not in self._slots:
            self._slots[signature] = make()
        return self._slots[signature]

    @property
    def table(self) -> _IntArray:
        """int32 [num_rows, width], physical pages, oldest first.

        Columns past a row's pages repeat its last one: masked numbers must be finite too, and so a row reads
        only what is its own. Idle rows have the scratch page alone.
        """
        return self._table

    @property
    def start(self) -> _IntArray:
        """int32 [num_rows], position of each row's first column."""
        return self._start


def row_groups(plans: Sequence[GroupPlan]) -> list[RowGroup]:
    """Of a memory plan, in its order, each tied to its successor."""
    groups: dict[str, RowGroup] = {}
    for plan in reversed(plans):
        successor = None if plan.spec.successor is None else groups[plan.spec.successor]
        groups[plan.spec.name] = RowGroup(plan.spec, plan.num_pages, successor)
    return [groups[plan.spec.name] for plan in plans]
