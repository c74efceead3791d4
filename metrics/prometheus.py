"""The recorder behind `/metrics`."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from threading import Lock

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import CollectorRegistry
from prometheus_client.utils import floatToGoString

from mlxd.metrics.catalogue import Catalogue
from mlxd.metrics.instruments import Counter, Gauge, Histogram, Instrument
from mlxd.metrics.stats import EngineSnapshot, RequestStats, StepStats
from mlxd.metrics.tally import Tally

_Fact = Callable[[], None]


class PrometheusRecorder:
    """Turns facts into the `mlxd_*` metrics of `registry`.

    A fact is queued, and tallied by whoever gets the lock: the thread that told it if the lock is free, else
    the next one to tell or to scrape. So recording never waits for a scrape, nor a scrape for the engine.
    The engine's facts are held back until its next snapshot and tallied together with it, so that every
    scrape sees accepted = ended + running + waiting + paused.

    Args:
        tenants: configured names, they alone become label values; empty puts every tenant under `_other`.
        registry: where to register; its own by default.
        wall_clock: Unix time in seconds, for timestamps alone.
    """

    def __init__(
        self,
        tenants: Sequence[str],
        registry: CollectorRegistry | None = None,
        *,
        version: str,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._tally = Tally(tenants, version, wall_clock())
        self._wall_clock = wall_clock
        self._lock = Lock()
        self._told: deque[_Fact] = deque()
        self._held_back: list[_Fact] = []
        self.registry = CollectorRegistry() if registry is None else registry
        self.registry.register(self)

    def add_tenants(self, names: Sequence[str]) -> None:
        """New tenants get labels of their own while there is room; a tenant that is gone keeps its own."""
        self._tell(partial(self._tally.add_tenants, names))

    def accepted(self, tenant: str) -> None:
        self._held_back.append(partial(self._tally.accepted, tenant))

    def request(self, stats: RequestStats) -> None:
        self._held_back.append(partial(self._tally.request, stats))

    def step(self, stats: StepStats) -> None:
        self._held_back.append(partial(self._tally.step, stats))

    def snapshot(self, snapshot: EngineSnapshot) -> None:
        facts, self._held_back = self._held_back, []
        facts.append(partial(self._tally.snapshot, snapshot, self._wall_clock()))
        self._tell(partial(_in_order, facts))

    def rejected(self, tenant: str, reason: str) -> None:
        self._tell(partial(self._tally.rejected, tenant, reason))

    def bad_message(self, reason: str) -> None:
        self._tell(partial(self._tally.bad_message, reason))

    def message(self, direction: str, kind: str) -> None:
        self._tell(partial(self._tally.message, direction, kind))

    def clients(self, connected: int, buffered_bytes: int) -> None:
        self._tell(partial(self._tally.clients, connected, buffered_bytes))

    def journal(self, written: int, failed: int, seconds: float) -> None:
        self._tell(partial(self._tally.journal, written, failed, seconds))

    def describe(self) -> Iterable[Metric]:
        """Names and types alone, for the registry's check against duplicates."""
        return [_to_metric(instrument) for instrument in Catalogue()]

    def collect(self) -> Iterable[Metric]:
        """All metrics as of one moment; the registry calls it at each scrape."""
        with self._lock:
            self._tally_told()
            self._tally.show()
            return [_to_metric(instrument) for instrument in self._tally.catalogue]

    def _tell(self, fact: _Fact) -> None:
        self._told.append(fact)
        if self._lock.acquire(blocking=False):
            try:
                self._tally_told()
            finally:
                self._lock.release()

    def _tally_told(self) -> None:
        # What others tell meanwhile is theirs to tally: else a busy thread could be kept here for ever.
        for _ in range(len(self._told)):
            self._told.popleft()()


def _in_order(facts: Iterable[_Fact]) -> None:
    for fact in facts:
        fact()


def _to_metric(instrument: Instrument) -> Metric:
    """The library's form of an instrument, its numbers copied."""
    match instrument:
        case Counter():
            counter = CounterMetricFamily(instrument.name, instrument.help, labels=instrument.labels)
            for labels, value in instrument.values.items():
                counter.add_metric(labels, value)
            return counter
        case Gauge():
            gauge = GaugeMetricFamily(instrument.name, instrument.help, labels=instrument.labels)
            for labels, value in instrument.values.items():
                gauge.add_metric(labels, value)
            return gauge
        case Histogram():
            return _to_histogram(instrument)


def _to_histogram(instrument: Histogram) -> Metric:
    histogram = HistogramMetricFamily(instrument.name, instrument.help, labels=instrument.labels)
    bounds = [*map(floatToGoString, instrument.bounds), "+Inf"]
    for labels, distribution in instrument.values.items():
        cumulative = accumulate(distribution.counts)
        histogram.add_metric(labels, list(zip(bounds, cumulative, strict=True)), distribution.sum)
    return histogram
