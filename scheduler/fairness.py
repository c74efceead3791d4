"""How evenly tenants are served."""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence

from mlxd.metrics.stats import FairnessStats
from mlxd.scheduler.policy import Policy
from mlxd.scheduler.tenant import Tenant
from mlxd.scheduler.tenants import TenantBook

WINDOW = 60
_SAMPLE_S = 1.0


def jain_index(values: Sequence[float]) -> float:
    """1 where all are equal, 1 / n where one has all; 1 where there is nothing to share.

    Source: Jain, Chiu and Hawe, A Quantitative Measure of Fairness (DEC-TR-301, 1984).
    """
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


class FairnessMeter:
    """Samples the tenants that wait once a second, and compares those that did in all of the last `WINDOW`.

    Attributes:
        preemptions, missed: counted by whoever sees them.
    """

    def __init__(self, book: TenantBook, policy: Policy, waits: Callable[[float], dict[str, int]]) -> None:
        """`waits`: queued requests at a time, by what they wait for."""
        self.preemptions: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self._book = book
        self._policy = policy
        self._waits = waits
        self._samples: deque[dict[str, float]] = deque(maxlen=WINDOW)
        self._streaks: dict[str, int] = {}
        self._sampled_at = float("-inf")
        self._sample = FairnessStats()

    def stats(self, now: float) -> FairnessStats:
        if not self._book.queued:
            self._samples.clear()
            self._streaks.clear()
            self._sampled_at, self._sample = float("-inf"), FairnessStats()
        elif now >= self._sampled_at + _SAMPLE_S:
            self._sampled_at, self._sample = now, self._take_sample(now)
        return FairnessStats(
            self._sample.service_gap,
            self._sample.jain_index,
            self._sample.waits,
            dict(self.preemptions),
            dict(self.missed),
        )

    def keep(self, names: Collection[str]) -> None:
        """Forget other tenants: one that has such a name later is another."""
        self._streaks = {name: streak for name, streak in self._streaks.items() if name in names}

    def gap(self, tenants: Iterable[Tenant]) -> float:
        """Between the highest and the lowest counter of these tenants, right now."""
        counters = [self._policy.counter(tenant) for tenant in tenants]
        return max(counters, default=0.0) - min(counters, default=0.0)

    def _take_sample(self, now: float) -> FairnessStats:
        queued = self._book.queued.values()
        self._samples.append({tenant.name: tenant.received for tenant in queued})
        self._streaks = {tenant.name: self._streaks.get(tenant.name, 0) + 1 for tenant in queued}
        oldest, latest = self._samples[0], self._samples[-1]
        lasting = [name for name, streak in self._streaks.items() if streak >= len(self._samples)]
        return FairnessStats(
            self.gap(queued),
            jain_index([latest[name] - oldest[name] for name in lasting]),
            self._waits(now),
        )
