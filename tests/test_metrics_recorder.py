"""What the facts told to the recorder become at a scrape."""

from dataclasses import replace

import pytest
from scraping import REQUEST, STEP, Scraped, told

from mlxd.metrics.prometheus import PrometheusRecorder
from mlxd.metrics.stats import EngineSnapshot, RunnerCounters, TenantGauges
from mlxd.metrics.tally import OUTCOMES


@pytest.fixture
def recorder() -> PrometheusRecorder:
    return PrometheusRecorder(["acme", "beta"], version="1.2.3", wall_clock=lambda: 5000.0)


def test_a_step_counts_its_rows_tokens_and_times(recorder: PrometheusRecorder) -> None:
    recorder.step(
        replace(
            STEP,
            decode_rows=2,
            prefill_rows=2,
            prompt_tokens={"acme": 64, "beta": 16},
            recomputed_tokens={"beta": 7},
            generated_tokens={"acme": 2},
            decode_s=0.01,
            prefill_s=0.006,
            joined=3,
            join_s=0.0002,
            left=1,
            leave_s=0.0001,
            token_gaps_s=(0.02, 0.03),
            preemptions={"pages": 2},
        )
    )
    scraped = told(recorder)
    assert scraped.get("mlxd_steps_total", kind="mixed") == 1
    assert scraped.get("mlxd_step_rows_total") == 2
    assert scraped.get("mlxd_prompt_tokens_total", tenant="beta", source="computed") == 16
    assert scraped.get("mlxd_prompt_tokens_total", tenant="beta", source="recomputed") == 7
    assert scraped.get("mlxd_generation_tokens_total", tenant="acme") == 2
    assert scraped.get("mlxd_step_duration_seconds_sum", kind="mixed") == pytest.approx(0.02)
    assert scraped.get("mlxd_step_device_seconds_total", part="decode") == pytest.approx(0.01)
    assert scraped.get("mlxd_step_device_seconds_total", part="prefill") == pytest.approx(0.006)
    assert scraped.get("mlxd_batch_changes_total", op="join") == 3
    assert scraped.get("mlxd_batch_changes_total", op="leave") == 1 + 2
    assert scraped.get("mlxd_batch_change_duration_seconds_count", op="join") == 1
    assert scraped.get("mlxd_batch_change_duration_seconds_sum", op="leave") == pytest.approx(0.0001)
    assert scraped.get("mlxd_inter_token_latency_seconds_count") == 2
    assert scraped.get("mlxd_inter_token_latency_seconds_sum") == pytest.approx(0.05)
    assert scraped.get("mlxd_preemptions_total", reason="pages") == 2


@pytest.mark.parametrize(
    ("decode_rows", "prefill_rows", "kind"), [(1, 0, "decode"), (0, 1, "prefill"), (4, 2, "mixed")]
)
def test_steps_are_of_the_kind_of_what_is_in_them(
    recorder: PrometheusRecorder, decode_rows: int, prefill_rows: int, kind: str
) -> None:
    tokens = {"acme": 1}  # a decode step, too, computes a position of a prompt: its last one
    recorder.step(replace(STEP, decode_rows=decode_rows, prefill_rows=prefill_rows, prompt_tokens=tokens))
    scraped = told(recorder)
    assert scraped.get("mlxd_steps_total", kind=kind) == scraped.total("mlxd_steps_total") == 1


def test_a_step_where_no_row_joined_or_left_observes_no_batch_change(recorder: PrometheusRecorder) -> None:
    recorder.step(replace(STEP, decode_rows=1))
    assert told(recorder).total("mlxd_batch_change_duration_seconds_count") == 0


def test_a_request_counts_once_by_tenant_and_outcome(recorder: PrometheusRecorder) -> None:
    recorder.request(REQUEST)
    scraped = told(recorder)
    assert scraped.get("mlxd_requests_total", tenant="acme", outcome="stop") == 1
    assert scraped.total("mlxd_requests_total") == 1
    assert scraped.get("mlxd_queue_time_seconds_sum", tenant="acme") == pytest.approx(0.004)
    assert scraped.get("mlxd_time_to_first_token_seconds_sum", tenant="acme") == pytest.approx(0.03)
    assert scraped.get("mlxd_request_duration_seconds_sum") == pytest.approx(0.2)
    assert scraped.get("mlxd_request_prompt_tokens_sum") == 7
    assert scraped.get("mlxd_request_generation_tokens_sum") == 3


def test_a_request_that_never_started_has_no_queue_time_and_no_first_token(
    recorder: PrometheusRecorder,
) -> None:
    recorder.request(replace(REQUEST, outcome="cancelled", queue_s=None, first_token_s=None))
    scraped = told(recorder)
    assert scraped.total("mlxd_queue_time_seconds_count") == 0
    assert scraped.total("mlxd_time_to_first_token_seconds_count") == 0
    assert scraped.get("mlxd_request_duration_seconds_count") == 1


@pytest.mark.parametrize(
    ("value", "first_bucket"),
    [(0.0, "0.001"), (0.001, "0.001"), (0.0011, "0.0025"), (80.0, "80.0"), (80.1, "+Inf")],
)
def test_bucket_bounds_are_inclusive_and_counts_cumulative(
    recorder: PrometheusRecorder, value: float, first_bucket: str
) -> None:
    recorder.step(replace(STEP, decode_rows=1, token_gaps_s=(value,)))
    scraped = told(recorder)
    name = "mlxd_inter_token_latency_seconds_bucket"
    bounds = sorted(scraped.values_of("le", name), key=float)
    counts = [scraped.get(name, le=bound) for bound in bounds]
    assert counts == [float(float(bound) >= float(first_bucket)) for bound in bounds]


@pytest.mark.parametrize(
    "histogram",
    ["mlxd_time_to_first_token_seconds", "mlxd_queue_time_seconds", "mlxd_request_duration_seconds"],
)
def test_waits_of_ten_minutes_and_of_a_millisecond_have_buckets(
    recorder: PrometheusRecorder, histogram: str
) -> None:
    recorder.request(REQUEST)
    bounds = [float(le) for le in told(recorder).values_of("le", f"{histogram}_bucket")]
    assert min(bounds) == 0.001
    assert 640 <= sorted(bounds)[-2] < float("inf")


def test_the_engine_state_is_shown_as_the_latest_snapshot_says(recorder: PrometheusRecorder) -> None:
    recorder.snapshot(EngineSnapshot(state="running", kv_used_bytes=1, prefilling=9))
    recorder.snapshot(
        EngineSnapshot(
            state="draining",
            steps=3,
            now=100.0,
            last_step_at=98.0,
            prefilling=1,
            prefill_tokens_left=40,
            tenants={"acme": TenantGauges(waiting=2, running=1, kv_reserved_bytes=512, service=7.5)},
            kv_used_bytes=256,
            kv_reserved_bytes=512,
            kv_capacity_bytes=4096,
            pages={"sliding:512": (3, 10)},
            runner=RunnerCounters(
                graph_compiles=4,
                graph_retraces=1,
                graph_failures=2,
                compiled_steps=20,
                eager_steps=5,
                memory_active_bytes=11,
                memory_peak_bytes=12,
                memory_cache_bytes=13,
            ),
        )
    )
    scraped = Scraped(recorder.registry)
    assert [
        (name, labels, scraped.get(name, **labels))
        for name, labels, value in EXPECTED_STATE
        if scraped.get(name, **labels) != value
    ] == []


EXPECTED_STATE: list[tuple[str, dict[str, str], float]] = [
    ("mlxd_engine_state", {"state": "draining"}, 1),
    ("mlxd_engine_state", {"state": "running"}, 0),
    ("mlxd_last_step_timestamp_seconds", {}, 4998.0),
    ("mlxd_rows_prefilling", {}, 1),
    ("mlxd_prefill_tokens_left", {}, 40),
    ("mlxd_requests_waiting", {"tenant": "acme"}, 2),
    ("mlxd_requests_running", {"tenant": "acme"}, 1),
    ("mlxd_requests_running", {"tenant": "beta"}, 0),
    ("mlxd_tenant_kv_reserved_bytes", {"tenant": "acme"}, 512),
    ("mlxd_tenant_service_total", {"tenant": "acme"}, 7.5),
    ("mlxd_kv_bytes", {"state": "used"}, 256),
    ("mlxd_kv_bytes", {"state": "reserved"}, 512),
    ("mlxd_kv_bytes", {"state": "capacity"}, 4096),
    ("mlxd_kv_pages", {"group": "sliding:512", "state": "held"}, 3),
    ("mlxd_kv_pages", {"group": "sliding:512", "state": "free"}, 7),
    ("mlxd_graph_compiles_total", {}, 4),
    ("mlxd_graph_retraces_total", {}, 1),
    ("mlxd_graph_failures_total", {}, 2),
    ("mlxd_decode_steps_total", {"mode": "compiled"}, 20),
    ("mlxd_decode_steps_total", {"mode": "eager"}, 5),
    ("mlxd_device_memory_bytes", {"kind": "active"}, 11),
    ("mlxd_device_memory_bytes", {"kind": "peak"}, 12),
    ("mlxd_device_memory_bytes", {"kind": "cache"}, 13),
]


def test_the_last_step_has_no_timestamp_before_the_first(recorder: PrometheusRecorder) -> None:
    assert told(recorder).get("mlxd_last_step_timestamp_seconds") is None


def test_the_last_step_is_when_its_tokens_were_read_whatever_snapshots_follow() -> None:
    unix = iter([1000.0, 1010.0, 1015.5, 1040.0])
    recorder = PrometheusRecorder(["acme"], version="1", wall_clock=lambda: next(unix))
    recorder.snapshot(EngineSnapshot(steps=2, now=10.0, last_step_at=9.0))
    recorder.snapshot(EngineSnapshot(steps=2, now=15.5, last_step_at=15.0))
    recorder.snapshot(EngineSnapshot(steps=3, now=40.1, last_step_at=15.0))
    scraped = Scraped(recorder.registry)
    assert scraped.get("mlxd_start_timestamp_seconds") == 1000.0
    assert scraped.get("mlxd_last_step_timestamp_seconds") == 1015.0


def test_counters_never_fall_when_the_engine_counts_from_zero_again(recorder: PrometheusRecorder) -> None:
    tenants = {"acme": TenantGauges(service=9.0)}
    recorder.snapshot(
        EngineSnapshot(runner=RunnerCounters(graph_compiles=5, compiled_steps=7), tenants=tenants)
    )
    Scraped(recorder.registry)
    recorder.snapshot(EngineSnapshot(state="failed"))
    scraped = Scraped(recorder.registry)
    assert scraped.get("mlxd_graph_compiles_total") == 5
    assert scraped.get("mlxd_decode_steps_total", mode="compiled") == 7
    assert scraped.get("mlxd_tenant_service_total", tenant="acme") == 9.0


def test_rejections_messages_and_clients_count_without_a_snapshot(recorder: PrometheusRecorder) -> None:
    recorder.rejected("beta", "queue_full")
    recorder.message("in", "generate")
    recorder.bad_message("not_msgpack")
    recorder.clients(4, 2048)
    scraped = Scraped(recorder.registry)
    assert scraped.get("mlxd_requests_rejected_total", tenant="beta", reason="queue_full") == 1
    assert scraped.get("mlxd_zmq_messages_total", direction="in", kind="generate") == 1
    assert scraped.get("mlxd_zmq_bad_messages_total", reason="not_msgpack") == 1
    assert scraped.get("mlxd_clients_connected") == 4
    assert scraped.get("mlxd_client_buffer_bytes") == 2048


def test_known_series_start_at_zero(recorder: PrometheusRecorder) -> None:
    scraped = Scraped(recorder.registry)
    assert scraped.values_of("outcome", "mlxd_requests_total") == set(OUTCOMES)
    assert scraped.values_of("tenant", "mlxd_generation_tokens_total") == {"acme", "beta", "_other"}
    assert scraped.total("mlxd_requests_total") == scraped.total("mlxd_steps_total") == 0


def test_two_recorders_do_not_share_a_registry_by_accident(recorder: PrometheusRecorder) -> None:
    other = PrometheusRecorder(["acme"], version="1")
    recorder.rejected("acme", "quota")
    assert Scraped(other.registry).total("mlxd_requests_rejected_total") == 0
    with pytest.raises(ValueError, match="Duplicated"):
        PrometheusRecorder(["acme"], recorder.registry, version="1")
