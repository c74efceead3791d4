"""Timing in a bounded time."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

_Measured = TypeVar("_Measured")

_REPEATS = 3
_HOPELESS = 2.0


class TimeBox:
    """So many seconds, from its making on."""

    def __init__(self, limit_s: float) -> None:
        self._ends_at = time.perf_counter() + limit_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._ends_at - time.perf_counter())

    @property
    def is_over(self) -> bool:
        return self.left_s == 0.0

    def part(self, share: float) -> "TimeBox":
        """One that ends when `share` of what is left now has passed."""
        return TimeBox(share * self.left_s)


def best_s(run: Callable[[], float], box: TimeBox, beat_s: float = math.inf) -> float:
    """Least of a few runs: what other work adds is never negative.

    Of one run where time is over, or where it takes far longer than the `beat_s` that it should beat.
    """
    times = [run()]
    while len(times) < _REPEATS and not box.is_over and min(times) < _HOPELESS * beat_s:
        times.append(run())
    return min(times)


def by_turns(runs: Mapping[str, Callable[[], float]], turns: int, box: TimeBox) -> dict[str, float]:
    """Least seconds of each in so many turns, in fewer where time is over.

    A first run of each, which may compile, does not count.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(1 + turns):
        for name, run in runs.items():
            times[name].append(run())
        if turn and box.is_over:
            break
    return {name: min(seconds[1:]) for name, seconds in times.items()}


def by_rows(
    buckets: Sequence[int],
    runs_at: Callable[[int], Mapping[str, Callable[[], float]]],
    turns: int,
    box: TimeBox,
    progress: Callable[[float], None],
) -> dict[int, dict[str, float]]:
    """As `by_turns`, of each row bucket that is reached in time, from the outside in.

    Args:
        runs_at: what is timed at so many rows.
        progress: told the part of the buckets that is done.
    """
    times: dict[int, dict[str, float]] = {}
    for rows in outside_in(buckets):
        if box.is_over:
            break
        progress(len(times) / len(buckets))
        times[rows] = by_turns(runs_at(rows), turns, box)
    return dict(sorted(times.items()))


def outside_in(values: Sequence[int]) -> list[int]:
    """Last, first, then the middle: the most telling ones first."""
    return [*values[-1:], *values[:1], *values[1:-1]] if len(values) > 1 else list(values)


def nearest_measured(times: Mapping[int, _Measured], buckets: Iterable[int]) -> dict[int, _Measured]:
    """What was measured at each bucket, or at the one nearest to it."""
    return {rows: times[min(times, key=lambda measured: abs(measured - rows))] for rows in buckets}
