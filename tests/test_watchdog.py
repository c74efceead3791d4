"""What counts as hung or dead, and what does not."""

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from scheduling import submission
from wire_daemon import Daemon, config, daemon, daemon_of, runner

from mlxd.batching.fake_runner import FakeRunner
from mlxd.metrics.stats import EngineSnapshot
from mlxd.scheduler.config import SchedulerConfig
from mlxd.scheduler.errors import EngineFailedError
from mlxd.scheduler.inbox import Inbox
from mlxd.scheduler.watchdog import Watchdog, stacks

LIMIT_S = 10.0
NOW = 1_000.0


def fault(
    *,
    is_alive: bool = True,
    unseen_s: float = 0.0,
    journal: Any = None,
    looks: Sequence[float] = range(-20, 1),
    **snapshot: Any,
) -> str:
    """What is seen at the last of `looks`, seconds from NOW on; it does not change meanwhile."""
    times = [NOW + look for look in looks]
    engine = SimpleNamespace(
        snapshot=EngineSnapshot(**snapshot),
        is_alive=is_alive,
        unseen_s=lambda now: unseen_s,
        clock=lambda: times[0],
    )
    quiet = SimpleNamespace(is_alive=True, busy_s=0.0)
    watchdog = Watchdog(engine, journal or quiet, LIMIT_S)  # type: ignore[arg-type]
    while len(times) > 1:
        times.pop(0)
        found = watchdog.fault()
    return found


@pytest.mark.parametrize(
    ("snapshot", "expected"),
    [
        ({"state": "running", "running": 1, "last_step_at": NOW - 9}, ""),
        ({"state": "running", "running": 1, "last_step_at": NOW - 11}, "no step for 11.0 s (limit 10 s)"),
        ({"state": "draining", "waiting": 1, "last_step_at": NOW - 11}, "no step for 11.0 s (limit 10 s)"),
        ({"state": "running", "last_step_at": NOW - 11}, ""),
        ({"state": "running", "running": 1, "last_step_at": NOW - 99, "busy_since": NOW - 1}, ""),
        ({"state": "running", "unseen_s": 9}, ""),
        ({"state": "running", "unseen_s": 11}, "no request was looked at for 11.0 s (limit 10 s)"),
        ({"state": "starting", "now": NOW - 500}, ""),
        ({"state": "failed", "is_alive": False, "running": 1, "last_step_at": NOW - 99}, ""),
        ({"state": "stopped", "is_alive": False}, ""),
        ({"state": "running", "is_alive": False}, "the engine's thread ended without a word"),
        ({"state": "starting", "is_alive": False}, "the engine's thread ended without a word"),
    ],
)
def test_an_engine_hangs_where_work_waits_for_too_long(snapshot: dict[str, Any], expected: str) -> None:
    assert fault(**snapshot) == expected


@pytest.mark.parametrize(
    ("is_alive", "busy_s", "expected"),
    [
        (True, 9.0, ""),
        (True, 11.0, "the journal's write takes 11.0 s (limit 10 s)"),
        (False, 0.0, "the journal's thread ended without a word"),
    ],
)
def test_a_journal_hangs_where_a_write_takes_too_long(is_alive: bool, busy_s: float, expected: str) -> None:
    assert fault(state="running", journal=SimpleNamespace(is_alive=is_alive, busy_s=busy_s)) == expected


@pytest.mark.parametrize(
    ("looks", "is_fault"),
    [
        ((-60, -59, 0), False),
        ((-60, -59, -5, 0), False),
        ((-60, -59, -9, -5, 0, 3), True),
        ((-60, *range(-11, 1, 5), 0), True),
    ],
)
def test_time_in_which_the_process_was_stopped_does_not_count(looks: Sequence[float], is_fault: bool) -> None:
    hung = {"state": "running", "running": 1, "last_step_at": NOW - 60}
    slow = SimpleNamespace(is_alive=True, busy_s=60.0)
    assert bool(fault(looks=looks, **hung)) is is_fault
    assert bool(fault(looks=looks, state="running", unseen_s=60.0)) is is_fault
    assert bool(fault(looks=looks, state="running", journal=slow)) is is_fault


def test_waiting_for_a_minutes_tokens_is_no_hang(tmp_path: Path) -> None:
    made = config(tmp_path, {"tokens_per_minute": 100})
    made = replace(made, scheduler=SchedulerConfig(step_timeout_s=1.0))
    with daemon_of(made, runner()) as served, served.submit() as peer:
        for name in "ab":
            peer.send("generate", id=name, prompt="hello", sampling={"max_tokens": 60})
        peer.until_terminal("a")
        time.sleep(1.5)
        peer.send("cancel", id="b")
        assert peer.until_terminal("b")[-1]["type"] == "cancelled"


def test_stacks_name_each_thread_and_where_it_is() -> None:
    entered, leave = threading.Event(), threading.Event()

    def stuck_here() -> None:
        entered.set()
        leave.wait()

    thread = threading.Thread(target=stuck_here, name="stuck")
    thread.start()
    entered.wait()
    text = stacks()
    leave.set()
    thread.join()
    part = next(part for part in text.split("\n\n") if part.startswith("thread stuck:"))
    assert "in stuck_here" in part
    assert "thread MainThread:" in text


class Leaving(FakeRunner):
    """Foreign code that ends its thread."""

    def launch(self, plan: Any) -> Any:
        sys.exit("no more")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_thread_that_ends_without_a_word_ends_every_request_and_the_daemon(tmp_path: Path) -> None:
    leaving = Leaving(runner().info.memory, vocab_size=runner().info.vocab_size)
    with daemon(tmp_path, runner=leaving) as served, served.submit() as peer:
        peer.send("generate", id="a", prompt="hi")
        end = peer.until_terminal("a")[-1]
        served.join()
    assert (end["code"], end["message"]) == ("engine_failed", "the engine's thread ended without a word")
    assert served.exit_code == 3


def test_a_submission_is_unseen_until_its_taker_comes_back_for_more() -> None:
    inbox = Inbox(4)
    assert inbox.unseen_s(NOW) == 0.0
    assert inbox.submit(submission("a"), NOW)
    assert inbox.submit(submission("b"), NOW + 1)
    assert inbox.unseen_s(NOW + 5) == 5.0
    assert len(inbox.take(None)) == 2
    assert inbox.submit(submission("c"), NOW + 6)
    assert inbox.unseen_s(NOW + 10) == 10.0
    assert len(inbox.take(None)) == 1
    assert inbox.unseen_s(NOW + 10) == 4.0
    assert inbox.take(0.0) == []
    assert inbox.unseen_s(NOW + 10) == 0.0
    assert inbox.submit(submission("d"), NOW + 10)
    inbox.close()
    assert inbox.unseen_s(NOW + 20) == 0.0


class Stuck(FakeRunner):
    """Hangs where no snapshot shows any work: in the launch of the first step, or in work put off at rest."""

    def __init__(self, at: str) -> None:
        super().__init__(runner().info.memory, vocab_size=runner().info.vocab_size)
        self._at = at
        self.is_stuck = threading.Event()
        self.leave = threading.Event()

    def launch(self, plan: Any) -> Any:
        self._hang("launch")
        return super().launch(plan)

    def maintain(self) -> bool:
        self._hang("maintain")
        return super().maintain()

    def _hang(self, at: str) -> None:
        if at == self._at:
            self.is_stuck.set()
            self.leave.wait()


@pytest.mark.parametrize("at", ["launch", "maintain"])
def test_a_request_that_a_hung_engine_never_came_to_ends_and_the_daemon_with_it(
    tmp_path: Path, at: str
) -> None:
    stuck = Stuck(at)
    made = replace(config(tmp_path), scheduler=SchedulerConfig(step_timeout_s=1.0))
    try:
        with Daemon(made, stuck) as served:
            with served.client() as client, pytest.raises(EngineFailedError) as raised:
                client.generate("hi")
            assert stuck.is_stuck.is_set()
            served.join()
    finally:
        stuck.leave.set()
    assert "no request was looked at" in str(raised.value)
    assert served.exit_code == 3
