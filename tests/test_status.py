"""What `mlxd status` tells whom."""

from pathlib import Path

import msgspec
import pytest
from wire_daemon import TENANTS, config, daemon, daemon_of, runner, wait_until

from mlxd.batching.sampling_params import SamplingParams
from mlxd.metrics.stats import EngineSnapshot, QuotaGauges, TenantGauges
from mlxd.scheduler.config import Config, JournalConfig, TenantConfig
from mlxd.scheduler.journal_room import JournalUsage
from mlxd.scheduler.messages import StatusReply
from mlxd.scheduler.quota import TokenBucket
from mlxd.scheduler.reports import status_reply
from mlxd.scheduler.status import JournalStatus

HASH = "0" * 64
NO_JOURNAL = JournalConfig()


def test_status_shows_a_tenant_itself_and_an_operator_everyone(tmp_path: Path) -> None:
    with daemon(tmp_path, runner=runner(0.005)) as served, served.submit("beta") as peer:
        peer.send("generate", id="a", prompt="hi", sampling={"max_tokens": 2000})
        wait_until(lambda: served.engine.snapshot.running == 1)
        with served.client("acme") as client:
            mine = client.status()
        with served.client("admin") as client:
            everyone = client.status()
        peer.send("cancel", id="a")
    assert (list(mine.tenants), mine.running) == (["acme"], 0)
    assert (sorted(everyone.tenants), everyone.running) == (sorted(TENANTS), 1)
    assert everyone.tenants["beta"].running == 1
    assert everyone.model == "fake"
    assert mine.engine is None
    assert everyone.engine is not None
    assert everyone.engine.kv_reserved_bytes > 0
    assert everyone.engine.last_step_age_s is not None


def test_a_tenants_tokens_and_the_uptime_are_in_the_status(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, served.client("acme") as client:
        client.generate("hi", SamplingParams(max_tokens=5, ignore_eos=True))
        status = client.status()
    assert status.tenants["acme"].generated_tokens == 5
    assert status.uptime_s > 0


def seen_by(asker: str, at: EngineSnapshot, journal: JournalConfig = NO_JOURNAL) -> StatusReply:
    """What tenant a (weight 3, 60 tokens a minute), b or the operator sees, 100 s after the start."""
    tenants = (
        TenantConfig(name="a", token_sha256=HASH, weight=3, tokens_per_minute=60),
        TenantConfig(name="b", token_sha256=HASH),
        TenantConfig(name="operator", token_sha256=HASH, operator=True),
    )
    (own,) = (tenant for tenant in tenants if tenant.name == asker)
    return status_reply(
        "",
        own,
        config=Config(version=1, tenants=tenants, journal=journal),
        state="running",
        epoch="",
        info=None,
        at=at,
        now=100.0,
        started_at=0.0,
        generated_tokens={},
        journal=JournalUsage({"a": 4096, "b": 1000}, 2**18),
    )


def test_weights_are_told_and_shares_are_of_all_work_and_for_operators() -> None:
    at = EngineSnapshot(tenants={"a": TenantGauges(work=75.0), "b": TenantGauges(work=25.0)})
    own, everyone = seen_by("a", at).tenants, seen_by("operator", at).tenants
    assert [(tenant.weight, tenant.share) for tenant in own.values()] == [(3, None)]
    assert {name: (tenant.weight, tenant.share) for name, tenant in everyone.items()} == {
        "a": (3, 0.75),
        "b": (1, 0.25),
        "operator": (1, 0.0),
    }
    assert seen_by("operator", EngineSnapshot()).tenants["a"].share == 0.0


@pytest.mark.parametrize(
    ("quota", "left"),
    [
        (None, 60),
        (QuotaGauges(60, level=10.0, at=100.0, held=0), 10),
        (QuotaGauges(60, level=10.0, at=95.0, held=0), 15),
        (QuotaGauges(60, level=10.0, at=95.0, held=4), 11),
        (QuotaGauges(60, level=10.0, at=0.0, held=7), 53),
        (QuotaGauges(60, level=-5.0, at=100.0, held=0), 0),
    ],
)
def test_what_is_left_of_a_minutes_tokens_is_told_as_of_now(quota: QuotaGauges | None, left: int) -> None:
    at = EngineSnapshot(tenants={"a": TenantGauges(quota=quota)})
    assert seen_by("a", at).tenants["a"].tokens_left == left
    assert seen_by("b", at).tenants["b"].tokens_left is None


def test_a_bucket_of_its_gauges_is_the_bucket() -> None:
    bucket = TokenBucket(60, 10.0, 5.0, 3)
    again = TokenBucket.of(bucket.gauges())
    assert [again.left_at(now) for now in (5, 9, 1000)] == [bucket.left_at(now) for now in (5, 9, 1000)]
    assert (again.ready_at(20, 5.0), again.held) == (bucket.ready_at(20, 5.0), 3)


@pytest.mark.parametrize(
    ("asker", "journal", "told"),
    [
        ("operator", JournalConfig(), None),
        ("a", JournalConfig(durability="accepted", path="/j"), JournalStatus(fsync="always")),
        (
            "operator",
            JournalConfig(durability="accepted", path="/j", fsync="never", max_bytes="1MiB"),
            JournalStatus(fsync="never", used_bytes=5096, max_bytes=2**20, part_bytes=2**18),
        ),
    ],
)
def test_the_journal_is_told_and_how_full_it_is_for_operators(
    asker: str, journal: JournalConfig, told: JournalStatus | None
) -> None:
    status = seen_by(asker, EngineSnapshot(), journal)
    assert status.journal == told
    assert status.tenants["a"].journal_bytes == 4096
    assert {"b"} & set(status.tenants) == ({"b"} if asker == "operator" else set())


def test_a_running_daemon_tells_quota_work_and_journal(tmp_path: Path) -> None:
    made = config(tmp_path, {"tokens_per_minute": 600, "weight": 2.0})
    folder = tmp_path / "own"
    folder.mkdir(mode=0o700)
    journal = JournalConfig(durability="accepted", path=str(folder / "journal"), max_bytes="1MiB")
    with daemon_of(msgspec.structs.replace(made, journal=journal), runner()) as served:
        with served.client("acme") as client:
            client.generate("hi", SamplingParams(max_tokens=100, ignore_eos=True))
            mine = client.status()
        with served.client("admin") as client:
            everyone = client.status()
    left = mine.tenants["acme"].tokens_left
    assert left is not None
    assert 498 - 2 <= left < 600
    assert everyone.tenants["beta"].tokens_left == 600
    assert [everyone.tenants[name].share for name in ("acme", "beta")] == [1.0, 0.0]
    assert everyone.tenants["acme"].weight == 2.0
    assert mine.journal == JournalStatus(fsync="always")
    assert everyone.journal is not None
    assert everyone.journal.max_bytes == 2**20
    assert everyone.journal.used_bytes == mine.tenants["acme"].journal_bytes > 0
    assert everyone.tenants["beta"].journal_bytes == 0
