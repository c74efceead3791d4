"""The documentation, dashboard, alerts and service files agree with what the daemon exports and takes."""

import json
import plistlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.metrics_core import Metric

from mlxd.metrics.catalogue import Catalogue
from mlxd.metrics.instruments import Histogram
from mlxd.metrics.prometheus import PrometheusRecorder
from mlxd.metrics.stats import DiskStats, EngineSnapshot, RequestStats, StepStats, TenantGauges
from mlxd.metrics.tally import MAX_OPEN_LABELS, MAX_TENANT_LABELS
from mlxd.scheduler import door, journal, server
from mlxd.scheduler.config import ServerConfig

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
DOCS = (ROOT / "docs" / "metrics.md").read_text()
KILL_AFTER_S = 60
COMMAND = ["/opt/mlxd/.venv/bin/mlxd", "serve", "/etc/mlxd/mlxd.yaml"]

SAMPLE_NAMES = {
    name
    for instrument in Catalogue()
    for name in (
        [f"{instrument.name}{suffix}" for suffix in ("_bucket", "_sum", "_count")]
        if isinstance(instrument, Histogram)
        else [instrument.name]
    )
}


def documented() -> list[tuple[str, str, tuple[str, ...]]]:
    """Name, type and labels of each row of the tables."""
    rows = re.findall(r"^\| `(mlxd_\w+)` \| (\w+) \|([^|]*)\|", DOCS, re.MULTILINE)
    return [(name, kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows]


def busy_recorder(tenants: list[str]) -> PrometheusRecorder:
    """Has told one of everything, for every tenant."""
    recorder = PrometheusRecorder(tenants, version="1")
    for tenant in tenants:
        recorder.accepted(tenant)
        recorder.rejected(tenant, "quota")
        recorder.request(RequestStats(tenant, "stop", 5, 2, 0.1, 0.2, 0.3))
    count = dict.fromkeys(tenants, 1)
    times = (0.1,) * 5
    recorder.step(StepStats(1, 1, count, count, count, *times, 1, 1, (0.1,), {"pages": 1}, True))
    recorder.message("in", "ping")
    recorder.bad_message("bad")
    recorder.clients(1, 1)
    recorder.journal(1, 0, 0.1)
    gauges = dict.fromkeys(tenants, TenantGauges())
    disk = DiskStats(1, 2, {"saved": 1}, {"absent": 1}, 0.1, 0.1)
    recorder.snapshot(EngineSnapshot(last_step_at=1.0, tenants=gauges, pages={"full": (1, 2)}, disk=disk))
    return recorder


def exported(recorder: PrometheusRecorder) -> Iterator[Metric]:
    return iter(recorder.registry.collect())


def test_the_documentation_lists_exactly_the_exported_metrics() -> None:
    catalogue = [(i.name, type(i).__name__.lower(), i.labels) for i in Catalogue()]
    assert sorted(documented()) == sorted(catalogue)


def test_everything_in_the_catalogue_is_exported_with_its_labels() -> None:
    samples = [sample for metric in exported(busy_recorder(["acme"])) for sample in metric.samples]
    assert {sample.name for sample in samples} == SAMPLE_NAMES
    labels = {i.name: set(i.labels) for i in Catalogue() if not isinstance(i, Histogram)}
    assert [s for s in samples if s.name in labels and set(s.labels) != labels[s.name]] == []


@pytest.mark.parametrize("instrument", list(Catalogue()), ids=lambda i: i.name)
def test_names_follow_the_rules(instrument: object) -> None:
    name = instrument.name  # type: ignore[attr-defined]
    assert re.fullmatch(r"mlxd_[a-z]+(_[a-z]+)*", name)
    assert name.endswith("_total") == (type(instrument).__name__ == "Counter")
    if isinstance(instrument, Histogram):
        assert re.search(r"_(seconds|tokens)$", name)
        assert list(instrument.bounds) == sorted(set(instrument.bounds))


def test_the_documented_limits_are_the_ones_in_force() -> None:
    assert f"of the first {MAX_TENANT_LABELS} in the file" in DOCS
    assert f"the first {MAX_OPEN_LABELS} values" in DOCS


def test_the_documented_series_budget_holds() -> None:
    def num_series(num_tenants: int) -> int:
        recorder = busy_recorder([f"t{i}" for i in range(num_tenants)])
        return sum(len(metric.samples) for metric in exported(recorder))

    per_tenant = (num_series(60) - num_series(10)) / 50
    assert per_tenant == 70 + 1, "70, and one rejection reason"
    assert num_series(50) - 50 * per_tenant == pytest.approx(210, abs=30)
    assert num_series(50) == pytest.approx(3700, abs=100)


def test_example_queries_dashboard_and_alerts_name_only_exported_series() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    alerts = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
    queries = re.findall(r"```promql\n(.*?)```", DOCS, re.DOTALL)
    queries += [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    used = {name for query in queries for name in re.findall(r"\bmlxd_\w+", query)}
    assert len(queries) > 40
    assert used - SAMPLE_NAMES == set()


def test_every_metric_is_on_the_dashboard() -> None:
    dashboard = (DEPLOY / "grafana.json").read_text()
    assert [i.name for i in Catalogue() if i.name not in dashboard] == []


def test_dashboard_panels_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in json.loads((DEPLOY / "grafana.json").read_text())["panels"]:
        place = panel["gridPos"]
        own = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert not own & cells, panel["title"]
        cells |= own


def test_prometheus_loads_the_alerts_that_are_there() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert [(DEPLOY / name).is_file() for name in config["rule_files"]] == [True]
    assert [job["job_name"] for job in config["scrape_configs"]] == ["mlxd"]


def test_systemd_and_launchd_start_the_same_command_and_wait_for_the_drain() -> None:
    unit = dict(
        line.split("=", 1)
        for line in (DEPLOY / "mlxd.service").read_text().splitlines()
        if "=" in line and not line.startswith(("#", "Environment="))
    )
    job = plistlib.loads((DEPLOY / "com.mlxd.daemon.plist").read_bytes())
    assert unit["ExecStart"].split() == job["ProgramArguments"] == COMMAND
    assert (unit["KillSignal"], unit["Restart"]) == ("SIGTERM", "on-failure")
    assert job["KeepAlive"] == {"SuccessfulExit": False}
    assert int(unit["TimeoutStopSec"]) == job["ExitTimeOut"] == KILL_AFTER_S


def test_a_drain_is_over_before_a_supervisor_kills() -> None:
    writing_s = server.WRITE_TIMEOUT_S + journal.CLOSE_TIMEOUT_S
    after_drain_s = server.STOP_TIMEOUT_S + writing_s + door.LINGER_MS / 1000
    assert ServerConfig().drain_timeout_s + after_drain_s < KILL_AFTER_S


def test_what_outlives_the_service_is_its_own() -> None:
    unit = (DEPLOY / "mlxd.service").read_text()
    assert "StateDirectoryMode=0700" in unit
    assert "CacheDirectoryMode=0700" in unit


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="checks what systemd would say")
def test_systemd_finds_no_fault_with_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "mlxd.service").read_text().replace(COMMAND[0], sys.executable)
    path = tmp_path / "mlxd.service"
    path.write_text(unit)
    run = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, check=False)
    assert [line for line in run.stderr.splitlines() if "mlxd" in line] == []


def test_the_image_holds_every_package_and_drains_on_stop() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert f"--stop-timeout {KILL_AFTER_S} " in dockerfile
    copied = re.findall(r"^COPY (\w+) \1$", dockerfile, re.MULTILINE)
    assert sorted(copied) == ["batching", "caches", "metrics", "scheduler"]
    assert "STOPSIGNAL SIGTERM" in dockerfile
