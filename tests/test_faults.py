"""Each named point of the engine's loop and of the journal, broken in each way: docs/reliability.md."""

import re
from pathlib import Path
from typing import Any

import pytest
from fault_points import ENGINE_POINTS, JOURNAL_POINTS, POINTS, POISON_SEED
from fault_process import TIMEOUT_S, Collector, body, durable_config, expected, fault_process, tokens
from wire_daemon import TERMINAL

ACTIONS = ("raise", "hang", "kill")
QUICK = [("launch a step", "raise"), ("wait for a step", "hang"), ("within a write", "kill")]
LONG = 1_000
"""Tokens that take longer than a hang is borne."""
SHORT = 40
"""Tokens that take so long that another request may come meanwhile."""
PAGE = Path(__file__).resolve().parent.parent / "docs" / "reliability.md"


def exit_code_of(point: str, action: str) -> int:
    if action == "kill":
        return -9
    return 1 if point in ENGINE_POINTS and action == "raise" else 3


def outcome_of(point: str, action: str) -> str:
    """What open requests come to."""
    if action == "kill":
        return "run again"
    return "engine_failed" if point in ENGINE_POINTS else "engine_failed, run again if accepted"


CASES = [
    pytest.param(point, action, marks=[] if (point, action) in QUICK else [pytest.mark.slow])
    for point in POINTS
    for action in ACTIONS
]


@pytest.mark.parametrize(("point", "action"), CASES)
def test_a_fault_at_any_point_gives_each_request_one_end_and_loses_none(
    tmp_path: Path, point: str, action: str
) -> None:
    config = durable_config(tmp_path, step_timeout_s=TIMEOUT_S)
    with fault_process(tmp_path, config, point, action) as broken, broken.peer() as peer:
        peer.send("generate", id="done", **body(1))
        done = peer.until_terminal("done")
        peer.send("generate", id="open", **body(2, LONG))
        assert peer.receive()["type"] == "accepted"
        collector = Collector(peer)
        broken.arm()
        peer.send("generate", id="late", **body(3))
        assert broken.process.wait(30) == exit_code_of(point, action), broken.log
        collector.stop()
        log = broken.log
    before = {name: collector.of(name) for name in ("open", "late")}
    for name, messages in before.items():
        ends = [message for message in messages if message["type"] in TERMINAL]
        is_owed = name == "open" or any(message["type"] == "accepted" for message in messages)
        assert len(ends) <= 1
        assert len(ends) == (action != "kill") or not is_owed, (name, messages[-1:])
        assert all(end.get("code") == "engine_failed" or end["type"] == "rejected" for end in ends)
        assert name == "late" or all(end["type"] == "error" for end in ends)
    if exit_code_of(point, action) == 3:
        assert "watchdog: " in log
        assert 'File "' in log
    check_restart(tmp_path, point, action, done, before)


def check_restart(
    folder: Path,
    point: str,
    action: str,
    done: list[dict[str, Any]],
    before: dict[str, list[dict[str, Any]]],
) -> None:
    """What ended is told as it was; what was accepted ends, and what was not may be sent again."""
    with fault_process(folder, durable_config(folder), action="quick") as again, again.peer() as peer:
        peer.send("resume", id="done")
        assert peer.until_terminal("done")[-1] == done[-1]
        peer.send("resume", id="open")
        whole = peer.until_terminal("open")
        if "run again" in outcome_of(point, action):
            assert tokens(whole) == expected(2, LONG)
            head = tokens(before["open"])
            assert head == expected(2, LONG)[1 : 1 + len(head)] or head == expected(2, LONG)[: len(head)]
        else:
            assert whole[-1]["code"] == "engine_failed"
        peer.send("generate", id="late", **body(3))
        late = peer.until_terminal("late")
        was_accepted = any(message["type"] == "accepted" for message in before["late"])
        if action == "kill" or not was_accepted:
            assert late[-1]["type"] in ("done", "error")
        assert late[-1]["type"] != "done" or tokens(late) == expected(3)


def test_a_request_that_kills_the_daemon_each_time_takes_no_other_one_along(tmp_path: Path) -> None:
    config = durable_config(tmp_path)
    others = {f"other {seed}": seed for seed in range(6)}
    with fault_process(tmp_path, config, action="poison") as first, first.peer() as peer:
        for name, seed in others.items():
            peer.send("generate", id=name, **body(seed, SHORT))
        while peer.receive()["type"] != "chunk":
            pass
        peer.send("generate", id="poison", **body(POISON_SEED))
        assert first.process.wait(10) == -9
    for _ in ("second", "third"):
        with fault_process(tmp_path, config, action="poison") as killed:
            assert killed.process.wait(20) == -9, killed.log
    with fault_process(tmp_path, config, action="poison") as fourth, fourth.peer() as peer:
        for name, seed in others.items():
            peer.send("resume", id=name)
            assert tokens(peer.until_terminal(name)) == expected(seed, SHORT)
        peer.send("resume", id="poison")
        end = peer.until_terminal("poison")[-1]
        assert (end["code"], "the last time with no other" in end["message"]) == ("engine_failed", True)
        fourth.process.terminate()
        assert fourth.process.wait(10) == 0


def test_the_table_of_the_page_is_what_these_tests_show() -> None:
    rows = re.findall(
        r"^\| (engine|journal) \| ([^|]+) \| (\w+) \| (-?\d+) \| ([^|]+) \|$", PAGE.read_text(), re.M
    )
    assert rows == [
        (
            "engine" if point in ENGINE_POINTS else "journal",
            point,
            action,
            str(exit_code_of(point, action)),
            outcome_of(point, action),
        )
        for point in (*ENGINE_POINTS, *JOURNAL_POINTS)
        for action in ACTIONS
    ]
