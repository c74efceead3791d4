"""Who keeps how many idle pages, and who gives up the next one."""

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping

Place = tuple[float, str]
"""Pages for a weight of 1, and the namespace."""


class IdlePages:
    """One pool's idle pages by namespace: who keeps most for its weight gives up the next one.

    That one keeps at least its part, by weight, of what all who keep any do. So nobody with less than its
    part ever gives up a page, whatever others send; and one alone may keep all there are. A change costs the
    logarithm of how many namespaces there are, once somebody looks.

    Attributes:
        total: of all namespaces.
        counts: by namespace.
    """

    def __init__(self) -> None:
        self.total = 0
        self.counts: Counter[str] = Counter()
        self._weights: Mapping[str, float] = {}
        self._order: list[Place] = []
        self._places: dict[str, Place] = {}
        self._changed: dict[str, None] = {}

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Weights above 0 from now on. Nobody finds the pages of a namespace without one: they go first."""
        self._weights = weights
        self._changed.update(dict.fromkeys(self._places))

    def add(self, namespace: str) -> None:
        """A page of it is idle now."""
        self.total += 1
        self.counts[namespace] += 1
        self._changed[namespace] = None

    def remove(self, namespace: str) -> None:
        """One of its idle pages is in use, or gone."""
        self.total -= 1
        self.counts[namespace] -= 1
        self._changed[namespace] = None

    @property
    def largest(self) -> str:
        """The namespace that gives up the next page, there being one; of equals the last by name."""
        self._settle()
        return self._order[-1][1]

    def _settle(self) -> None:
        for namespace in self._changed:
            place = self._places.pop(namespace, None)
            if place is not None:
                del self._order[bisect_left(self._order, place)]
            if self.counts[namespace]:
                place = self._places[namespace] = self._place(namespace)
                insort(self._order, place)
            else:
                del self.counts[namespace]
        self._changed.clear()

    def _place(self, namespace: str) -> Place:
        weight = self._weights.get(namespace)
        return (self.counts[namespace] / weight if weight else math.inf, namespace)
