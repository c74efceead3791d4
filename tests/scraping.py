"""Facts to tell and scrapes to read, for the tests of metrics."""

from collections import Counter

from prometheus_client.registry import CollectorRegistry

from mlxd.metrics.prometheus import PrometheusRecorder
from mlxd.metrics.stats import EngineSnapshot, RequestStats, StepStats

STEP = StepStats(
    decode_rows=0,
    prefill_rows=0,
    prompt_tokens={},
    recomputed_tokens={},
    generated_tokens={},
    step_s=0.02,
    decode_s=0.0,
    prefill_s=0.0,
    join_s=0.0,
    leave_s=0.0,
    joined=0,
    left=0,
    token_gaps_s=(),
    preemptions={},
    compiled=False,
)
REQUEST = RequestStats(
    tenant="acme",
    outcome="stop",
    prompt_tokens=7,
    generated_tokens=3,
    queue_s=0.004,
    first_token_s=0.03,
    duration_s=0.2,
)

ZERO_WHEN_IDLE = (
    "mlxd_requests_running",
    "mlxd_requests_waiting",
    "mlxd_requests_paused",
    "mlxd_rows_prefilling",
    "mlxd_prefill_tokens_left",
    "mlxd_tenant_kv_reserved_bytes",
    "mlxd_clients_connected",
    "mlxd_client_buffer_bytes",
)

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Scraped:
    """One scrape, asked by name and labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.samples: Samples = {
            (s.name, tuple(sorted(s.labels.items()))): s.value for m in registry.collect() for s in m.samples
        }

    def get(self, name: str, **labels: str) -> float | None:
        return self.samples.get((name, tuple(sorted(labels.items()))))

    def total(self, name: str) -> float:
        return sum(value for (sample, _), value in self.samples.items() if sample == name)

    def by(self, label: str, name: str) -> Counter[str]:
        """The sums over all other labels."""
        sums: Counter[str] = Counter()
        for (sample, labels), value in self.samples.items():
            if sample == name:
                sums[dict(labels)[label]] += int(value)
        return sums

    def values_of(self, label: str, name: str) -> set[str]:
        return {dict(labels)[label] for sample, labels in self.samples if sample == name}


def balance(scraped: Scraped) -> tuple[float, float]:
    accounted = ("total", "running", "waiting", "paused")
    return scraped.total("mlxd_requests_accepted_total"), sum(
        scraped.total(f"mlxd_requests_{state}") for state in accounted
    )


def unbalanced(scraped: Scraped) -> dict[str, tuple[int, int]]:
    """Tenant -> (accepted, accounted for), where the two differ."""
    accepted = scraped.by("tenant", "mlxd_requests_accepted_total")
    accounted = sum(
        (
            scraped.by("tenant", f"mlxd_requests_{state}")
            for state in ("total", "running", "waiting", "paused")
        ),
        start=type(accepted)(),
    )
    return {
        tenant: (count, accounted[tenant]) for tenant, count in accepted.items() if count != accounted[tenant]
    }


def is_at_rest(scraped: Scraped) -> bool:
    kv = scraped.by("state", "mlxd_kv_bytes")
    pages = scraped.by("state", "mlxd_kv_pages")
    gauges = [scraped.total(name) for name in ZERO_WHEN_IDLE]
    return not any([*gauges, kv["used"], kv["reserved"], pages["held"]])


def told(recorder: PrometheusRecorder) -> Scraped:
    """Scrape after the engine told a snapshot."""
    recorder.snapshot(EngineSnapshot(state="running"))
    return Scraped(recorder.registry)
