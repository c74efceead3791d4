"""Tables, progress and log lines; the demo and the memory plan of the real model."""

import io
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console, RenderableType

from mlxd.batching.fake_runner import fake_memory
from mlxd.caches.budget import show_bytes
from mlxd.metrics.stats import FairnessStats
from mlxd.scheduler import cli
from mlxd.scheduler.config import Config, TenantConfig
from mlxd.scheduler.logs import configure_logging
from mlxd.scheduler.messages import StatusReply
from mlxd.scheduler.plan_tables import plan_tables
from mlxd.scheduler.progress import ProgressBars
from mlxd.scheduler.status import DiskStatus, JournalStatus, TenantStatus
from mlxd.scheduler.status_tables import status_tables, summarise_buckets, tokens_per_s
from mlxd.scheduler.tables import show
from mlxd.scheduler.testing import fake_status


def shown(renderable: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=100).print(renderable)
    return out.getvalue()


ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (2**30, "1 GiB"), (2**50, "1024 TiB")],
)
def test_sizes_are_shown_in_binary_units(size: int, shown: str) -> None:
    assert show_bytes(size) == shown


def test_buckets_are_summed_up_by_what_they_cover() -> None:
    assert summarise_buckets(()) == "none"
    assert summarise_buckets(("rows=16 pages=2", "rows=4 pages=2")) == "2: rows=4,16 pages=2"


def look(uptime_s: float, tokens: int, epoch: str = "a") -> StatusReply:
    gauges = TenantStatus(waiting=0, running=0, kv_reserved_bytes=0, service=0.0, generated_tokens=tokens)
    return replace(fake_status(), uptime_s=uptime_s, epoch=epoch, tenants={"acme": gauges})


@pytest.mark.parametrize(
    ("before", "now", "pace"),
    [
        (look(1, 10), look(3, 50), 20.0),
        (look(3, 50), look(3, 50), None),
        (look(9, 50), look(1, 5, "b"), None),
    ],
    ids=["going on", "one look", "started anew"],
)
def test_two_looks_tell_the_pace(before: StatusReply, now: StatusReply, pace: float | None) -> None:
    assert tokens_per_s(before, now) == pace


def test_what_was_chosen_at_start_shows_in_details_alone() -> None:
    status = replace(look(3723, 7), notes={"attention": "in_place"})
    texts = [shown(status_tables(status, details=details)) for details in (True, False)]
    assert ["attention" in text for text in texts] == [True, False]
    assert all("up           1:02:03" in text and "7 generated" in text for text in texts)


def test_operators_see_how_tenants_are_served_beside_each_other() -> None:
    fairness = FairnessStats(12.4, 0.98765, {"rows": 3, "kv_share": 0}, {"slice": 2, "pages": 1}, {})
    status = look(1, 1)
    assert "Jain" not in shown(status_tables(status))
    lines = shown(status_tables(replace(status, fairness=fairness))).splitlines()
    assert "fairness     service gap 12, Jain index 0.988" in lines
    assert "waits        3 rows" in lines
    assert "preempted    1 pages, 2 slice" in lines
    assert "deadlines    none" in lines


def test_the_disk_shows_where_there_is_one() -> None:
    disk = DiskStatus(folder="/var/cache/mlxd", pages=3, used_bytes=1536, max_bytes=2**30)
    lines = {
        None: [],
        disk: ["disk         /var/cache/mlxd: 3 pages, 1.5 KiB of 1 GiB"],
        replace(disk, is_off=True): ["disk         /var/cache/mlxd: failed, and is off until a restart"],
    }
    for each, expected in lines.items():
        told = shown(status_tables(replace(fake_status(), disk=each))).splitlines()
        assert [text.rstrip() for text in told if text.startswith("disk")] == expected


def test_the_journal_shows_as_far_as_it_is_told() -> None:
    told = JournalStatus(fsync="always", used_bytes=1536, max_bytes=2**30, part_bytes=2**20)
    lines = {
        None: "off: requests end with the daemon",
        JournalStatus(fsync="never"): "on, fsync never",
        told: "on, fsync always: 1.5 KiB of 1 GiB, 1 MiB of it each tenant's own",
    }
    for journal, line in lines.items():
        shown_lines = shown(status_tables(replace(look(1, 1), journal=journal))).splitlines()
        assert f"journal      {line}" in [text.rstrip() for text in shown_lines]


def test_a_tenant_shows_what_it_may_and_what_it_has() -> None:
    tenant = TenantStatus(
        weight=2.5,
        waiting=1,
        running=2,
        kv_reserved_bytes=1024,
        service=7.0,
        share=0.25,
        generated_tokens=9,
        tokens_left=50,
        journal_bytes=2048,
    )
    limited = replace(tenant, service=None, share=None, tokens_left=None)
    journal = JournalStatus(fsync="always")
    status = replace(fake_status(), journal=journal, tenants={"acme": tenant, "beta": limited})
    rows = [line.split() for line in shown(status_tables(status)).splitlines()]
    assert ["acme", "2.5", "2", "1", "0", "9", "50", "1", "KiB", "2", "KiB", "7", "25.0%"] in rows
    assert ["beta", "2.5", "2", "1", "0", "9", "any", "1", "KiB", "2", "KiB"] in rows


def headings(status: StatusReply, width: int) -> list[str]:
    """The headings of the tenants' table on a terminal of that width."""
    out = io.StringIO()
    Console(file=out, width=width).print(status_tables(status))
    return next(line.split() for line in out.getvalue().splitlines() if line.startswith("tenant "))


def test_a_column_that_says_nothing_of_any_tenant_is_left_out() -> None:
    tenant = TenantStatus(waiting=0, running=0, kv_reserved_bytes=0, generated_tokens=0)
    plain = replace(fake_status(), tenants={"acme": tenant})
    assert " ".join(headings(plain, 120)) == "tenant weight running waiting paused tokens KV reserved"
    limited = replace(plain, tenants={"acme": replace(tenant, tokens_left=5)})
    assert set(headings(limited, 120)) - set(headings(plain, 120)) == {"left", "a", "minute"}
    operators = replace(plain, tenants={"acme": replace(tenant, service=1.0, share=1.0)})
    assert set(headings(operators, 120)) - set(headings(plain, 120)) == {"service", "share"}


@pytest.mark.parametrize("journal", [None, JournalStatus(fsync="always")], ids=["no journal", "journal"])
def test_no_heading_and_no_number_is_cut_off_on_a_terminal_of_80_columns(
    journal: JournalStatus | None,
) -> None:
    tenant = TenantStatus(
        weight=2.5,
        waiting=112,
        running=32,
        kv_reserved_bytes=15_000_000,
        service=1_234_567.0,
        share=0.253,
        generated_tokens=1_234_567,
        journal_bytes=17_000,
    )
    status = replace(fake_status(), journal=journal, tenants={"steady8": tenant})
    assert headings(status, 80) == headings(status, 200)
    out = io.StringIO()
    Console(file=out, width=80).print(status_tables(status))
    assert "…" not in out.getvalue()


def test_small_shares_are_shown_and_nothing_is_padded_off_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = Config(version=1, tenants=(TenantConfig(name="acme", token_sha256="0" * 64, kv_share=0.005),))
    blas = "OpenBLAS (/a/long/path/" + "x" * 200 + ")"
    show(plan_tables(config, "m", blas, fake_memory()))
    lines = capsys.readouterr().out.splitlines()
    assert f"BLAS           {blas}" in lines
    assert any(line.split()[:1] == ["acme"] and "0.5%" in line for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_the_plan_names_each_group_and_tenant_even_with_brackets_in_a_path() -> None:
    config = Config(
        version=1, tenants=(TenantConfig(name="acme", token_sha256="0" * 64, weight=3, operator=True),)
    )
    plan = fake_memory(max_rows=2, max_model_len=64, window=32)
    text = shown(plan_tables(config, "/models/[bold]x", "OpenBLAS", plan))
    lines = [line.split() for line in text.splitlines()]
    assert ["model", "/models/[bold]x"] in lines
    assert ["full", "1", "64", "16", "8", "4", "8", "KiB"] in lines
    assert any(line[:1] == ["sliding:32"] for line in lines)
    assert ["acme", "3", "32", "256", "100%", "0%", "any", "normal", "yes"] in lines


def test_progress_off_a_terminal_is_a_line_a_quarter() -> None:
    out = io.StringIO()
    with ProgressBars(Console(file=out)) as bars:
        for percent in range(101):
            bars("load", percent / 100)
        bars("trace", 1.0)
    lines = [f"mlxd: load {percent}%" for percent in (0, 25, 50, 75, 100)]
    assert out.getvalue().splitlines() == [*lines, "mlxd: trace 100%"]


def test_bars_on_a_terminal_end_with_their_stages_and_begin_again() -> None:
    out = io.StringIO()
    stderr = sys.stderr
    with ProgressBars(Console(file=out, force_terminal=True, width=80)) as bars:
        bars("load", 0.5)
        assert sys.stderr is not stderr, "log lines must go above running bars"
        bars("load", 1.0)
        assert sys.stderr is stderr
        bars("trace", 0.2)
    assert sys.stderr is stderr
    assert "load" in out.getvalue()
    assert "100%" in out.getvalue()
    assert "trace" in out.getvalue()


@pytest.fixture
def _logging_as_before() -> Iterator[None]:
    logger = logging.getLogger("mlxd")
    before = logger.handlers, logger.propagate, logger.level
    yield
    logger.handlers, logger.propagate, logger.level = before


@pytest.mark.usefixtures("_logging_as_before")
def test_a_log_line_holds_time_level_and_module(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    logging.getLogger("mlxd.scheduler.x").debug("hidden")
    logging.getLogger("mlxd.scheduler.x").info("ready model=%s", "m")
    (line,) = capsys.readouterr().err.splitlines()
    fields = line.split(" ")
    assert [field.partition("=")[0] for field in fields[:3]] == ["ts", "level", "module"]
    assert line.endswith(" ready model=m")


@pytest.mark.slow
def test_check_prints_the_plan_of_the_built_in_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["check", str(ROOT / "deploy/demo.yaml")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["max", "context", "1024", "tokens"] in lines
    assert any(line[:3] == ["full", "30", "46080"] for line in lines)
    assert any(line[:2] == ["acme", "3"] for line in lines)


@pytest.mark.slow
def test_the_demo_serves_both_tenants_and_ends_well() -> None:
    command = [sys.executable, str(ROOT / "examples/demo.py")]
    demo = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert demo.returncode == 0, demo.stderr
    answers = [line for line in demo.stdout.splitlines() if " -> " in line]
    assert sorted(answer.split()[0] for answer in answers) == ["acme"] * 12 + ["beta"] * 6
    assert "The capital of France is Paris." in demo.stdout
    acme, beta = map(int, re.findall(r"^  (?:acme|beta) +[13] +(\d+) +\d+%", demo.stdout, re.MULTILINE))
    assert acme > beta, "weights 3 and 1, but a few requests long: a row more or less at the edges tells"
    assert 'mlxd_requests_total{outcome="stop",tenant="acme"}' in demo.stdout
    assert "the daemon ended with code 0" in demo.stdout


@pytest.mark.slow
def test_ctrl_c_ends_the_demo_with_one_line() -> None:
    command = [sys.executable, str(ROOT / "examples/demo.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        next(line for line in demo.stdout if " -> " in line)
        demo.send_signal(signal.SIGINT)
        _, err = demo.communicate(timeout=60)
    assert demo.returncode == 130
    news = [line for line in err.splitlines() if line and not re.fullmatch(r"mlxd: [\w-]+ \d+%", line)]
    assert news == ["demo: interrupted; the daemon was stopped"]
