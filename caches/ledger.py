"""Bytes of KV that live rows hold or were promised."""

from collections.abc import Sequence
from dataclasses import dataclass

from mlxd.caches.sizing import MemoryPlan


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pages promised to one row, one count a group, in the plan's group order."""

    pages: tuple[int, ...]


class Ledger:
    """Reservations of live rows against each group's capacity; it never asks the allocator.

    `overcommit` f lets reservations reach f times the capacity; with f = 1 a row once admitted always gets
    its pages.
    """

    def __init__(self, plan: MemoryPlan, overcommit: float = 1.0) -> None:
        self._plan = plan
        self._limits = tuple(int(group.num_promised * overcommit) for group in plan.groups)
        self._reserved: dict[int, Reservation] = {}
        self._totals = [0] * len(plan.groups)

    def worst_case(self, num_tokens: int) -> Reservation:
        """What a row that reaches `num_tokens` positions may hold at most."""
        return Reservation(tuple(g.spec.pages_for(num_tokens, self._plan.chunk) for g in self._plan.groups))

    def ever_fits(self, reservation: Reservation) -> bool:
        """Whether an empty machine could hold it."""
        return all(n <= g.num_promised for n, g in zip(reservation.pages, self._plan.groups, strict=True))

    @property
    def room(self) -> tuple[int, ...]:
        """Pages a group that may still be promised."""
        return tuple(limit - total for limit, total in zip(self._limits, self._totals, strict=True))

    def promised(self, row_id: int) -> Reservation:
        """What is promised to a row."""
        return self._reserved[row_id]

    def fits(self, reservation: Reservation, kept: Sequence[int] = ()) -> bool:
        """Whether it may be promised with `kept` pages a group to spare, none where it is empty."""
        for group, n in enumerate(reservation.pages):
            spare = kept[group] if kept else 0
            if self._totals[group] + n + spare > self._limits[group]:
                return False
        return True

    def reserve(self, row_id: int, reservation: Reservation) -> None:
        """Promise it; the caller has asked `fits` first."""
        assert row_id not in self._reserved, f"row {row_id} is reserved already"
        assert self.fits(reservation), f"row {row_id} does not fit"
        self._reserved[row_id] = reservation
        for group, n in enumerate(reservation.pages):
            self._totals[group] += n

    def give_back(self, row_id: int, group: int) -> None:
        """End the promise of this group's pages: the row will hold none of them again."""
        pages = self._reserved[row_id].pages
        self._totals[group] -= pages[group]
        self._reserved[row_id] = Reservation((*pages[:group], 0, *pages[group + 1 :]))

    def release(self, row_id: int) -> None:
        for group, n in enumerate(self._reserved.pop(row_id).pages):
            self._totals[group] -= n

    def bytes_of(self, reservation: Reservation) -> int:
        return sum(n * g.spec.page_bytes for n, g in zip(reservation.pages, self._plan.groups, strict=True))

    @property
    def reserved_bytes(self) -> int:
        return self.bytes_of(Reservation(tuple(self._totals)))

    def check_integrity(self) -> None:
        """Raises AssertionError unless the totals are the sum of the live reservations."""
        sums = [sum(r.pages[i] for r in self._reserved.values()) for i in range(len(self._totals))]
        assert sums == self._totals, f"ledger says {self._totals}, rows add up to {sums}"
