"""What is timed again, and for how long."""

import itertools

import pytest

from mlxd.batching import timing
from mlxd.batching.timing import TimeBox, by_rows, by_turns, nearest_measured, outside_in


class Clock:
    """Seconds that pass with each look."""

    def __init__(self, step_s: float) -> None:
        self._times = itertools.count(0, step_s)

    def perf_counter(self) -> float:
        return next(self._times)


@pytest.mark.parametrize(("limit_s", "runs"), [(0.0, 1), (1.5, 2), (100.0, 3)])
def test_a_timing_runs_once_and_again_while_there_is_time(
    limit_s: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "time", Clock(1.0))
    box, seen = TimeBox(limit_s), []

    def run() -> float:
        seen.append(5.0 - len(seen))
        return seen[-1]

    assert timing.best_s(run, box) == min(seen)
    assert len(seen) == runs


@pytest.mark.parametrize(("beat_s", "runs"), [(2.0, 1), (3.0, 3)])
def test_a_run_that_takes_twice_as_long_as_the_best_is_not_repeated(beat_s: float, runs: int) -> None:
    times = iter([5.0, 5.0, 5.0])
    assert timing.best_s(times.__next__, TimeBox(100), beat_s) == 5.0
    assert len(list(times)) == 3 - runs


@pytest.mark.parametrize(("limit_s", "turns"), [(0.0, 1), (1.5, 2), (100.0, 3)])
def test_turns_go_on_while_there_is_time_and_the_first_does_not_count(
    limit_s: float, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "time", Clock(1.0))
    seen: list[str] = []

    def run(name: str) -> float:
        seen.append(name)
        return 0.0 if len(seen) <= 2 else float(len(seen))

    found = by_turns({"a": lambda: run("a"), "b": lambda: run("b")}, 3, TimeBox(limit_s))
    assert seen == ["a", "b"] * (1 + turns)
    assert found == {"a": 3.0, "b": 4.0}


@pytest.mark.parametrize(
    ("values", "order"), [([], []), ([1], [1]), ([1, 2], [2, 1]), ([1, 2, 4, 8], [8, 1, 2, 4])], ids=str
)
def test_ends_come_first(values: list[int], order: list[int]) -> None:
    assert outside_in(values) == order


def test_what_was_not_measured_has_its_nearest() -> None:
    assert nearest_measured({1: "a", 32: "b"}, [1, 2, 16, 32]) == {1: "a", 2: "a", 16: "a", 32: "b"}


def test_buckets_are_timed_from_the_outside_in_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    box, seen, told = TimeBox(60.0), [], []

    def run(rows: int) -> float:
        seen.append(rows)
        if rows == 1:
            monkeypatch.setattr(TimeBox, "is_over", True)
        return float(rows)

    found = by_rows([1, 2, 4, 8], lambda rows: {"a": lambda: run(rows)}, 2, box, told.append)
    assert found == {1: {"a": 1.0}, 8: {"a": 8.0}}
    assert seen == [8, 8, 8, 1, 1]
    assert told == [0.0, 0.25]
