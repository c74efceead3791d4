"""What a step says that its parts took, under a clock of our own."""

from collections.abc import Sequence

import mlx.core as mx
import pytest

from mlxd.batching import mlx_step
from mlxd.batching.mlx_step import Launch, LaunchedForward, MlxStep, StepClock
from mlxd.batching.plan import DecodeEntry, PrefillChunk, RowResult, StepPlan
from mlxd.batching.row import Row
from mlxd.batching.sampling_params import SamplingParams

ROW = Row(1, SamplingParams(), 0, (1, 2, 3), [], ())
DECODE, CHUNK = (DecodeEntry(ROW, 2, 0, 3),), (PrefillChunk(ROW, 0, 2, (1, 2)),)


class NoDraw:
    """Nothing to wait for."""

    arrays: tuple[mx.array, ...] = ()

    def results(self) -> tuple[RowResult, ...]:
        return ()


def parts(
    patch: pytest.MonkeyPatch,
    clock: StepClock,
    plan: StepPlan,
    launch: Sequence[float],
    waits: Sequence[float],
    prefill_first: bool = False,
    forwards_at: Sequence[float] = (),
) -> tuple[float, float]:
    """
    Args:
        waits: when the wait begins, when the first part is there, when the second one is.
        forwards_at: when each prefill forward was launched; one, after its part, where none is said.
    """
    times = iter(waits)
    last_at = launch[1] if prefill_first else launch[2]
    forwards_at = (forwards_at or (last_at,)) if plan.prefill else ()
    patch.setattr(mlx_step.time, "perf_counter", lambda: next(times))
    draw = NoDraw() if plan.decode else None
    step = MlxStep(
        clock,
        Launch(*launch),
        plan,
        draw,  # type: ignore[arg-type]
        [LaunchedForward(mx.array(0), at) for at in forwards_at],
        compiled=False,
        prefill_first=prefill_first,
    )
    result = step.wait()
    return round(result.decode_s, 6), round(result.prefill_s, 6)


MIXED, DECODES, CHUNKS = StepPlan(1, DECODE, CHUNK), StepPlan(1, DECODE), StepPlan(1, (), CHUNK)


@pytest.mark.parametrize(
    ("plan", "launch_blocks", "launch", "waits", "expected"),
    [
        pytest.param(MIXED, False, (10, 11, 12), (20, 21, 25), (10, 4), id="a device beside the host"),
        pytest.param(DECODES, False, (10, 11, 11), (20, 21, 21), (10, 0), id="no prefill there"),
        pytest.param(CHUNKS, False, (10, 10, 12), (20, 20, 25), (0, 13), id="no decode there"),
        pytest.param(MIXED, True, (10, 15, 35), (90, 90, 90), (5, 20), id="another launch in between"),
        pytest.param(MIXED, True, (10, 15, 35), (35, 35, 37), (5, 22), id="nothing in between"),
        pytest.param(DECODES, True, (10, 15, 15), (15, 16, 16), (6, 0), id="no prefill"),
        pytest.param(CHUNKS, True, (10, 10, 30), (30, 30, 31), (0, 21), id="no decode"),
    ],
)
def test_parts_of_a_step_take_their_own_time(
    plan: StepPlan,
    launch_blocks: bool,
    launch: tuple[float, float, float],
    waits: tuple[float, float, float],
    expected: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where launching blocks, the next step's launch is none of it."""
    assert parts(monkeypatch, StepClock(launch_blocks), plan, launch, waits) == expected


def test_a_part_begins_where_the_step_before_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StepClock(launch_blocks=False)
    assert parts(monkeypatch, clock, MIXED, (10, 11, 12), (20, 21, 25)) == (10, 4)
    assert parts(monkeypatch, clock, MIXED, (13, 14, 15), (29, 30, 34)) == (5, 4)


@pytest.mark.parametrize(
    ("alone_s", "launch", "expected"),
    [
        pytest.param(3, (10, 11, 12), (3, 11), id="it decoded as long as alone"),
        pytest.param(3, (10, 11, 17), (6, 8), id="prefill was launched later"),
        pytest.param(30, (10, 11, 12), (9, 5), id="it was there when somebody looked"),
    ],
)
def test_where_nobody_saw_that_decoding_ended_prefill_has_the_rest(
    alone_s: float,
    launch: tuple[float, float, float],
    expected: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = StepClock(launch_blocks=False)
    parts(monkeypatch, clock, DECODES, (0, 1, 1), (1, 1 + alone_s, 1 + alone_s))
    clock.done_at = 0.0
    assert parts(monkeypatch, clock, MIXED, launch, (20, 20, 25)) == expected


def test_a_step_that_was_there_before_it_was_asked_for_does_not_say_when_it_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next one's first part was begun when it was launched, not when somebody looked."""
    clock = StepClock(launch_blocks=False)
    assert parts(monkeypatch, clock, DECODES, (10, 11, 11), (15, 15, 15)) == (4, 0)
    assert parts(monkeypatch, clock, MIXED, (12, 13, 14), (20, 21, 23), prefill_first=True) == (2, 8)


@pytest.mark.parametrize(
    ("plan", "prefill_first", "waits", "expected"),
    [
        pytest.param(CHUNKS, False, (40, 40, 45), (0, 33), id="no decode there"),
        pytest.param(CHUNKS, False, (40, 40, 40), (0, 10), id="it was there when somebody looked"),
        pytest.param(CHUNKS, True, (40, 45, 45), (0, 33), id="no decode after it"),
        pytest.param(MIXED, True, (40, 45, 46), (1, 33), id="before decoding"),
        pytest.param(MIXED, True, (40, 40, 46), (6, 29), id="it was there before decoding"),
        pytest.param(MIXED, False, (40, 40, 45), (1, 33), id="after decoding that nobody saw end"),
        pytest.param(MIXED, False, (40, 42, 45), (31, 3), id="after decoding"),
    ],
)
def test_prefill_that_is_waited_for_began_when_the_first_of_its_forwards_was_launched(
    plan: StepPlan,
    prefill_first: bool,
    waits: tuple[float, float, float],
    expected: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others are built while that one runs, so that their launch is part of the time.

    Where nobody saw prefill end, the time since its launch stands for the launch: both would count twice.
    """
    launch, forwards_at = (10, 11, 30), (12, 21, 30)
    found = parts(monkeypatch, StepClock(False), plan, launch, waits, prefill_first, forwards_at)
    assert found == expected


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        pytest.param((41, 41, 41), (0, 30), id="prefill was there, too"),
        pytest.param((41, 41, 45), (30, 4), id="prefill was not"),
    ],
)
def test_prefill_is_not_told_to_take_no_time_where_decoding_is_thought_to_take_longer(
    waits: tuple[float, float, float], expected: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps would be filled with prefill, and rows that decode wait for all of it."""
    clock = StepClock(launch_blocks=False, decode_s=50)
    assert parts(monkeypatch, clock, MIXED, (10, 11, 11), waits) == expected


@pytest.mark.parametrize(
    ("plan", "waits", "known_s"),
    [
        pytest.param(DECODES, (12, 15, 15), 4, id="it was waited for"),
        pytest.param(DECODES, (90, 90, 90), 7, id="it was there when somebody looked"),
        pytest.param(StepPlan(1), (12, 15, 15), 7, id="nothing was computed"),
        pytest.param(MIXED, (12, 15, 18), 7, id="not alone"),
    ],
)
def test_how_long_decoding_takes_alone_is_known_from_steps_that_decode_alone_and_are_waited_for(
    plan: StepPlan,
    waits: tuple[float, float, float],
    known_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = StepClock(launch_blocks=False, decode_s=7)
    parts(monkeypatch, clock, plan, (10, 11, 11), waits)
    assert clock.decode_s == known_s


@pytest.mark.parametrize(
    ("plan", "launch_blocks", "expected"),
    [
        pytest.param(MIXED, False, (4, 10), id="a device beside the host"),
        pytest.param(DECODES, False, (13, 0), id="no prefill there"),
        pytest.param(CHUNKS, False, (0, 14), id="no decode there"),
        pytest.param(MIXED, True, (5, 2), id="launching blocks"),
    ],
)
def test_prefill_may_be_the_first_part(
    plan: StepPlan, launch_blocks: bool, expected: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = StepClock(launch_blocks)
    assert parts(monkeypatch, clock, plan, (10, 11, 12), (20, 21, 25), prefill_first=True) == expected


def test_decoding_that_was_there_as_soon_as_prefill_is_told_as_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = StepClock(launch_blocks=False)
    assert parts(monkeypatch, clock, MIXED, (10, 11, 12), (20, 21, 21), prefill_first=True) == (0, 10)


def test_a_step_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((20.0, 21.0, 25.0))
    monkeypatch.setattr(mlx_step.time, "perf_counter", lambda: next(times))
    step = MlxStep(StepClock(launch_blocks=False), Launch(10, 11, 12), CHUNKS, None, [], compiled=False)
    assert step.wait() is step.wait()
