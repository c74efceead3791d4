"""Counters, gauges and histograms as plain numbers by label values; not thread-safe, their owner locks."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

OTHER = "_other"
"""Stands for every label value that has no series of its own."""

Labels = tuple[str, ...]


@dataclass(slots=True)
class Counter:
    """A number by label values that only rises. `name` ends in `_total`."""

    name: str
    help: str
    labels: Labels = ()
    values: dict[Labels, float] = field(default_factory=dict)

    def add(self, amount: float, *labels: str) -> None:
        self.values[labels] = self.values.get(labels, 0) + amount

    def raise_to(self, total: float, *labels: str) -> None:
        """Follow a count kept elsewhere; where that one starts over, this one waits for it."""
        self.values[labels] = max(self.values.get(labels, 0), total)


@dataclass(slots=True)
class Gauge:
    """A number by label values that moves both ways."""

    name: str
    help: str
    labels: Labels = ()
    values: dict[Labels, float] = field(default_factory=dict)

    def set(self, value: float, *labels: str) -> None:
        self.values[labels] = value


@dataclass(slots=True)
class Distribution:
    """How many observations fell into each bucket; the last one has no upper bound."""

    counts: list[int]
    sum: float = 0.0


@dataclass(slots=True)
class Histogram:
    """Distributions by label values over shared, rising, inclusive upper `bounds`."""

    name: str
    help: str
    bounds: tuple[float, ...]
    labels: Labels = ()
    values: dict[Labels, Distribution] = field(default_factory=dict)

    def observe(self, value: float, *labels: str) -> None:
        self.observe_all((value,), *labels)

    def observe_all(self, values: Iterable[float], *labels: str) -> None:
        distribution = self.values.get(labels)
        if distribution is None:
            distribution = self.values[labels] = Distribution([0] * (len(self.bounds) + 1))
        counts, bounds, total = distribution.counts, self.bounds, 0.0
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        distribution.sum += total


Instrument = Counter | Gauge | Histogram


class LabelGuard:
    """Keeps a label's values few: known ones and the first `limit` new ones pass, the rest are `_other`."""

    def __init__(self, known: Iterable[str] = (), limit: int = 0) -> None:
        self._known = set(known)
        self._left = limit

    def __call__(self, value: str) -> str:
        if value in self._known:
            return value
        if self._left <= 0:
            return OTHER
        self._left -= 1
        self._known.add(value)
        return value
