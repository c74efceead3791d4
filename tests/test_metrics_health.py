"""The rules by which the daemon calls itself fit."""

import json

import pytest

from mlxd.metrics.health import judge
from mlxd.metrics.stats import EngineSnapshot

NOW = 1000.0
STALL_S = 30.0


def snapshot(**fields: object) -> EngineSnapshot:
    base: dict[str, object] = {"state": "running", "now": NOW, "last_step_at": NOW}
    return EngineSnapshot(**(base | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        pytest.param(snapshot(running=2), "", id="stepping"),
        pytest.param(snapshot(last_step_at=10.0, now=20.0), "", id="idle for long"),
        pytest.param(snapshot(last_step_at=0.0), "", id="never stepped, nothing to do"),
        pytest.param(snapshot(running=1, last_step_at=NOW - 30), "", id="exactly at the limit"),
        pytest.param(
            snapshot(running=1, waiting=2, last_step_at=NOW - 31, busy_since=NOW - 50),
            "no step for 31.0 s (limit 30 s) with 2 waiting and 1 running",
            id="step hangs",
        ),
        pytest.param(
            snapshot(waiting=1, last_step_at=NOW - 500, busy_since=NOW - 40, now=NOW),
            "no step for 40.0 s (limit 30 s) with 1 waiting and 0 running",
            id="engine turns but never steps",
        ),
        pytest.param(
            snapshot(waiting=1, last_step_at=NOW - 500, busy_since=NOW - 5),
            "",
            id="work came after a long idle",
        ),
        pytest.param(
            snapshot(waiting=1, last_step_at=0.0, busy_since=NOW - 40),
            "no step for 40.0 s (limit 30 s) with 1 waiting and 0 running",
            id="first step hangs",
        ),
        pytest.param(
            snapshot(waiting=1, last_step_at=NOW - 500, now=NOW - 35),
            "no step for 35.0 s (limit 30 s) with 1 waiting and 0 running",
            id="busy_since not told: counted from the snapshot",
        ),
        pytest.param(snapshot(state="starting", last_step_at=0.0), "the model is loading", id="starting"),
        pytest.param(snapshot(state="draining"), "draining: takes no new requests", id="draining"),
        pytest.param(
            snapshot(state="draining", running=1, last_step_at=NOW - 31, busy_since=NOW - 50),
            "no step for 31.0 s (limit 30 s) with 0 waiting and 1 running",
            id="drain hangs",
        ),
        pytest.param(snapshot(state="stopped"), "engine is stopped", id="stopped"),
        pytest.param(
            snapshot(state="failed", error="out of memory"), "engine failed: out of memory", id="failed"
        ),
        pytest.param(snapshot(state="failed"), "engine failed: no reason given", id="failed, reason unknown"),
        pytest.param(snapshot(state="odd"), "engine is odd", id="unknown state"),
    ],
)
def test_health_is_ok_exactly_where_there_is_no_reason_against(given: EngineSnapshot, reason: str) -> None:
    health = judge(given, NOW, STALL_S)
    assert (health.reason, health.ok) == (reason, reason == "")


@pytest.mark.parametrize(
    ("unseen_s", "reason"),
    [(30.0, ""), (31.0, "no request was looked at for 31.0 s (limit 30 s)")],
)
def test_an_engine_that_does_not_come_to_a_request_is_not_ok(unseen_s: float, reason: str) -> None:
    assert judge(snapshot(), NOW, STALL_S, unseen_s=unseen_s).reason == reason


def test_health_tells_counts_and_time_since_the_last_step() -> None:
    health = judge(snapshot(waiting=3, running=2, last_step_at=NOW - 1.25), NOW, STALL_S)
    assert json.loads(json.dumps(health.as_dict())) == {
        "ok": True,
        "state": "running",
        "reason": "",
        "seconds_since_last_step": 1.25,
        "waiting": 3,
        "running": 2,
    }


def test_time_since_the_last_step_is_unknown_before_the_first() -> None:
    assert judge(snapshot(last_step_at=0.0), NOW).seconds_since_last_step is None
