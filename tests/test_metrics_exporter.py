"""The HTTP door: what it answers, when it cannot open, and that it leaves nothing behind."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from mlxd.metrics import exporter as exporter_module
from mlxd.metrics.exporter import Exporter, ExporterError
from mlxd.metrics.health import Health, judge
from mlxd.metrics.prometheus import PrometheusRecorder
from mlxd.metrics.stats import EngineSnapshot

HEALTHY = EngineSnapshot(state="running", now=5.0, last_step_at=5.0, running=1, steps=1)


def healthy() -> Health:
    return judge(HEALTHY, 5.0)


@pytest.fixture
def recorder() -> PrometheusRecorder:
    return PrometheusRecorder(["acme"], version="1.2.3")


@pytest.fixture
def exporter(recorder: PrometheusRecorder) -> Iterator[Exporter]:
    with Exporter("127.0.0.1:0", recorder.registry, healthy) as exporter:
        yield exporter


def fetch(port: int, path: str, method: str = "GET") -> tuple[int, str, str]:
    """Status, content type, body."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.getheader("Content-Type", ""), response.read().decode()


def test_metrics_are_served_in_the_text_format(exporter: Exporter) -> None:
    status, content_type, body = fetch(exporter.port, "/metrics?x=1")
    samples = {s.name: s for family in text_string_to_metric_families(body) for s in family.samples}
    assert (status, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert samples["mlxd_build_info"].labels == {"version": "1.2.3"}


def test_a_healthy_engine_answers_200_with_one_line_of_json(exporter: Exporter) -> None:
    status, content_type, body = fetch(exporter.port, "/healthz")
    assert (status, content_type, body.count("\n")) == (200, "application/json", 1)
    assert json.loads(body) == healthy().as_dict()


def test_an_unfit_engine_answers_503_with_the_reason(recorder: PrometheusRecorder) -> None:
    failed = EngineSnapshot(state="failed", error="boom")
    with Exporter("127.0.0.1:0", recorder.registry, lambda: judge(failed, 5.0)) as exporter:
        status, _, body = fetch(exporter.port, "/healthz")
    assert status == 503
    assert json.loads(body)["reason"] == "engine failed: boom"


@pytest.mark.parametrize("path", ["/", "/metric", "/metrics/", "/healthz/x", "//[", "/favicon.ico"])
def test_other_paths_are_404(exporter: Exporter, path: str) -> None:
    assert fetch(exporter.port, path)[0] == 404


@pytest.mark.parametrize(("path", "status"), [("/metrics", 200), ("/healthz", 200), ("/", 404)])
def test_head_answers_as_get_without_a_body(exporter: Exporter, path: str, status: int) -> None:
    assert fetch(exporter.port, path, "HEAD")[::2] == (status, "")


def test_both_pages_answer_while_the_engine_thread_hangs(recorder: PrometheusRecorder) -> None:
    hangs, end = threading.Event(), threading.Event()
    stuck = EngineSnapshot(state="running", now=1.0, last_step_at=1.0, busy_since=0.5, running=1, steps=1)

    def engine() -> None:
        recorder.snapshot(stuck)
        recorder.accepted("acme")
        hangs.set()
        end.wait()

    thread = threading.Thread(target=engine)
    thread.start()
    hangs.wait()
    try:
        with Exporter("127.0.0.1:0", recorder.registry, lambda: judge(stuck, 100.0)) as exporter:
            assert fetch(exporter.port, "/metrics")[0] == 200
            status, _, body = fetch(exporter.port, "/healthz")
    finally:
        end.set()
        thread.join()
    assert status == 503
    assert json.loads(body)["reason"] == "no step for 99.0 s (limit 30 s) with 0 waiting and 1 running"


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("9464", "metrics address '9464' is not host:port"),
        (":9464", "metrics address ':9464' is not host:port"),
        ("", "metrics address '' is not host:port"),
        ("localhost:", "metrics address 'localhost:' has port ''; it must be 0 to 65535"),
        ("localhost:http", "metrics address 'localhost:http' has port 'http'; it must be 0 to 65535"),
        ("localhost:65536", "metrics address 'localhost:65536' has port '65536'; it must be 0 to 65535"),
        ("localhost:-1", "metrics address 'localhost:-1' has port '-1'; it must be 0 to 65535"),
        ("a..b:1", "metrics address 'a..b:1' has no valid host name"),
        ("192.0.2.1:9464", "cannot serve metrics at '192.0.2.1:9464': "),
    ],
)
def test_a_bad_address_is_refused_by_name_and_reason(
    recorder: PrometheusRecorder, address: str, message: str
) -> None:
    with pytest.raises(ExporterError) as caught:
        Exporter(address, recorder.registry, healthy)
    assert str(caught.value).startswith(message)


def test_a_taken_port_is_refused_by_name_and_reason(exporter: Exporter) -> None:
    address = f"127.0.0.1:{exporter.port}"
    with pytest.raises(ExporterError, match=rf"cannot serve metrics at '{address}': Address already in use"):
        Exporter(address, CollectorRegistry(), healthy)


def test_close_ends_all_threads_and_frees_the_port(recorder: PrometheusRecorder) -> None:
    before = set(threading.enumerate())
    exporter = Exporter("127.0.0.1:0", recorder.registry, healthy)
    fetch(exporter.port, "/metrics")
    with closing(socket.create_connection(("127.0.0.1", exporter.port))) as idle:
        idle.sendall(b"GET /met")
        wait_for(lambda: len(threading.enumerate()) == len(before) + 2)
        started = time.monotonic()
        exporter.close()
        exporter.close()
        assert time.monotonic() - started < 2
        assert is_cut_off(idle)
    wait_for(lambda: set(threading.enumerate()) <= before)
    with Exporter(f"127.0.0.1:{exporter.port}", recorder.registry, healthy) as again:
        assert again.port == exporter.port


def idle_connections(port: int, number: int) -> list[socket.socket]:
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(number)]
    for connection in idle:
        connection.sendall(b"GET /met")
    return idle


def test_connections_that_say_nothing_make_way_for_those_that_do(exporter: Exporter) -> None:
    idle = idle_connections(exporter.port, 40)
    try:
        assert fetch(exporter.port, "/healthz")[0] == 200
        assert is_cut_off(idle[0])
    finally:
        for connection in idle:
            connection.close()


def test_a_connection_is_cut_off_at_its_deadline_however_it_trickles(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter_module, "_DEADLINE_S", 0.3)
    (trickling,) = idle_connections(exporter.port, 1)
    began = time.monotonic()
    with closing(trickling), suppress(OSError):
        while time.monotonic() < began + 5.0:
            trickling.sendall(b"x")
            time.sleep(0.02)
    assert 0.2 < time.monotonic() - began < 2.0


def test_a_client_that_leaves_early_is_not_an_error(
    exporter: Exporter, caplog: pytest.LogCaptureFixture
) -> None:
    for sent in (b"", b"\r\n", b"GET /metrics HTTP/1.0\r\n\r\n", b"\x16\x03\x01 nonsense\r\n\r\n"):
        with closing(socket.create_connection(("127.0.0.1", exporter.port))) as connection:
            connection.sendall(sent)
    assert fetch(exporter.port, "/healthz")[0] == 200
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


def is_cut_off(connection: socket.socket) -> bool:
    connection.settimeout(5)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def answers(port: int) -> bool:
    try:
        return fetch(port, "/healthz")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def wait_for(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)
