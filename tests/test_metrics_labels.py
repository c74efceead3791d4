"""Label values stay few and are never a client's to choose."""

from dataclasses import replace

import pytest
from scraping import REQUEST, STEP, Scraped, told

from mlxd.metrics.prometheus import PrometheusRecorder
from mlxd.metrics.stats import EngineSnapshot, TenantGauges
from mlxd.metrics.tally import MAX_OPEN_LABELS, MAX_TENANT_LABELS


@pytest.fixture
def recorder() -> PrometheusRecorder:
    return PrometheusRecorder(["acme", "beta"], version="1")


def test_tenants_that_are_not_configured_share_one_label(recorder: PrometheusRecorder) -> None:
    for name in ("mallory", "eve", "_other"):
        recorder.accepted(name)
        recorder.rejected(name, "quota")
        recorder.request(replace(REQUEST, tenant=name))
        recorder.step(replace(STEP, prompt_tokens={name: 1}, generated_tokens={name: 1}))
    gauges = {name: TenantGauges(waiting=1, running=2, service=1.5) for name in ("mallory", "eve")}
    recorder.snapshot(EngineSnapshot(tenants=gauges))
    scraped = Scraped(recorder.registry)
    names = {dict(labels).get("tenant") for _, labels in scraped.samples} - {None}
    assert names == {"acme", "beta", "_other"}
    assert scraped.get("mlxd_requests_accepted_total", tenant="_other") == 3
    assert scraped.get("mlxd_requests_waiting", tenant="_other") == 2
    assert scraped.get("mlxd_requests_running", tenant="_other") == 4
    assert scraped.get("mlxd_tenant_service_total", tenant="_other") == 3.0


def test_the_number_of_tenant_series_is_bounded() -> None:
    recorder = PrometheusRecorder([f"t{i}" for i in range(MAX_TENANT_LABELS + 50)], version="1")
    recorder.accepted(f"t{MAX_TENANT_LABELS - 1}")
    recorder.accepted(f"t{MAX_TENANT_LABELS}")
    scraped = told(recorder)
    assert len(scraped.values_of("tenant", "mlxd_requests_accepted_total")) == MAX_TENANT_LABELS + 1
    assert scraped.get("mlxd_requests_accepted_total", tenant=f"t{MAX_TENANT_LABELS - 1}") == 1
    assert scraped.get("mlxd_requests_accepted_total", tenant="_other") == 1


def test_a_tenant_that_comes_later_gets_a_label_while_there_is_room() -> None:
    recorder = PrometheusRecorder([f"t{i}" for i in range(MAX_TENANT_LABELS - 1)], version="1")
    recorder.add_tenants(["t0", "late", "too_late"])
    for name in ("t1", "late", "too_late"):
        recorder.accepted(name)
    scraped = told(recorder)
    labels = scraped.values_of("tenant", "mlxd_requests_total")
    assert len(labels) == MAX_TENANT_LABELS + 1
    assert {"t1", "late", "_other"} <= labels
    for name in ("t1", "late", "_other"):
        assert scraped.get("mlxd_requests_accepted_total", tenant=name) == 1


def test_no_tenants_drops_the_label() -> None:
    recorder = PrometheusRecorder([], version="1")
    recorder.request(REQUEST)
    assert told(recorder).values_of("tenant", "mlxd_requests_total") == {"_other"}


def test_the_number_of_kinds_and_reasons_is_bounded(recorder: PrometheusRecorder) -> None:
    for i in range(3 * MAX_OPEN_LABELS):
        recorder.message("in", f"kind{i}")
        recorder.bad_message(f"reason{i}")
        recorder.rejected("acme", f"reason{i}")
    scraped = Scraped(recorder.registry)
    for label, name in (
        ("kind", "mlxd_zmq_messages_total"),
        ("reason", "mlxd_zmq_bad_messages_total"),
        ("reason", "mlxd_requests_rejected_total"),
    ):
        assert len(scraped.values_of(label, name)) == MAX_OPEN_LABELS + 1
        assert scraped.total(name) == 3 * MAX_OPEN_LABELS
