"""Who keeps how many idle pages, and who gives up the next one."""

import math
from collections import Counter
from collections.abc import Mapping
from heapq import heapify, heappop, heappush, heapreplace

Place = tuple[float, str]
"""Pages for a weight of 1, negative, and the namespace: the least one gives up the next page."""
_SPARE = 16


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
        self._places: list[Place] = []
        self._risen: dict[str, None] = {}

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Weights above 0 from now on. Nobody finds the pages of a namespace without one: they go first."""
        self._weights = weights
        self._rebuild()

    def add(self, namespace: str) -> None:
        """A page of it is idle now."""
        self.total += 1
        self.counts[namespace] += 1
        self._risen[namespace] = None

    def remove(self, namespace: str) -> None:
        """One of its idle pages is in use, or gone."""
        self.total -= 1
        self.counts[namespace] -= 1

    @property
    def largest(self) -> str:
        """The namespace that gives up the next page, there being one; of equals the first by name."""
        places = self._places
        for namespace in self._risen:
            heappush(places, self._place(namespace))
        self._risen.clear()
        if len(places) > 2 * len(self.counts) + _SPARE:
            self._rebuild()
        # Whoever keeps any has a place that is its own, or was so when it kept more.
        while True:
            namespace = places[0][1]
            if not self.counts[namespace]:
                heappop(places)
            elif places[0] == (place := self._place(namespace)):
                return namespace
            else:
                heapreplace(places, place)

    def _rebuild(self) -> None:
        self._risen.clear()
        self.counts = +self.counts
        self._places[:] = map(self._place, self.counts)
        heapify(self._places)

    def _place(self, namespace: str) -> Place:
        weight = self._weights.get(namespace)
        return (-self.counts[namespace] / weight if weight else -math.inf, namespace)
