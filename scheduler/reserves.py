"""Pages that are kept for tenants who do not use them yet."""

from collections.abc import Mapping, Sequence

from mlxd.caches.ledger import Reservation


class Reserves:
    """Each tenant's own part of every layer group, in pages promised.

    A promise to a tenant uses its own part first; of others' parts, what they do not use is out of its reach.
    """

    def __init__(self, shares: Mapping[str, float], limits: Sequence[int]) -> None:
        """
        Args:
            shares: tenant -> part of every group, 0 to 1, together at most 1.
            limits: pages that may be promised, one count a group.
        """
        self._limits = tuple(limits)
        self._own = {name: _pages(share, limits) for name, share in shares.items() if share > 0}
        self._used = {name: [0] * len(limits) for name in self._own}
        self._all = tuple(sum(own[group] for own in self._own.values()) for group in range(len(limits)))
        self._kept = list(self._all)

    def kept_from(self, name: str) -> tuple[int, ...]:
        """Pages a group that are kept for tenants other than `name`."""
        if name not in self._own:
            return tuple(self._kept)
        return tuple(kept - unused for kept, unused in zip(self._kept, self._unused(name), strict=True))

    def covers(self, name: str, reservation: Reservation) -> bool:
        """Whether the promise would lie in what is kept for `name`."""
        return name in self._own and all(
            n <= unused for n, unused in zip(reservation.pages, self._unused(name), strict=True)
        )

    def ever_allows(self, name: str, reservation: Reservation) -> bool:
        """Whether the promise could be made to `name` with nothing promised yet."""
        own = self._own.get(name, (0,) * len(self._limits))
        needs = zip(reservation.pages, self._all, own, self._limits, strict=True)
        return all(n + kept - mine <= limit for n, kept, mine, limit in needs)

    def promise(self, name: str, reservation: Reservation) -> None:
        self._move(name, reservation, 1)

    def release(self, name: str, reservation: Reservation) -> None:
        self._move(name, reservation, -1)

    def _unused(self, name: str) -> tuple[int, ...]:
        return tuple(max(0, own - used) for own, used in zip(self._own[name], self._used[name], strict=True))

    def _move(self, name: str, reservation: Reservation, sign: int) -> None:
        if name not in self._own:
            return
        before = self._unused(name)
        for group, n in enumerate(reservation.pages):
            self._used[name][group] += sign * n
        for group, unused in enumerate(self._unused(name)):
            self._kept[group] += unused - before[group]


def _pages(share: float, limits: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(share * limit) for limit in limits)
