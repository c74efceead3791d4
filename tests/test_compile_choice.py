"""Whether a step is compiled: the faster way, by row bucket."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_process import write_tiny_model
from loading import load
from tiny_models import Rig, make_rig

from mlxd.batching import compile_choice, tuning
from mlxd.batching.compile_choice import choose_compiled, usual_rows
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.runner import ignore_progress
from mlxd.batching.timing import TimeBox


def runner_that_takes(seconds: Callable[[int, bool], float], monkeypatch: pytest.MonkeyPatch) -> MlxRunner:
    """Steps of so many rows, by whether they are compiled."""
    runner = make_rig("llama", "gathered", max_rows=16, max_model_len=16).runner
    monkeypatch.setattr(runner, "trace", lambda rows, *_: seconds(rows, runner.step.compiles_at(rows)))
    return runner


@pytest.mark.parametrize(("bucket", "rows"), [(1, 1), (2, 2), (4, 3), (8, 6), (32, 24)])
def test_eager_steps_are_timed_with_the_rows_that_a_bucket_usually_has(bucket: int, rows: int) -> None:
    assert usual_rows(bucket) == rows


def test_each_row_bucket_runs_the_faster_way(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_that_takes(lambda rows, compiled: 4.0 if compiled else float(rows), monkeypatch)
    times = choose_compiled(runner, runner.info.memory, TimeBox(60.0))
    assert times[8] == {"compiled": 4.0, "eager": 6.0}
    assert list(times) == [1, 2, 4, 8, 16]
    assert [runner.step.compiles_at(rows) for rows in (1, 2, 3, 4, 5, 8, 16)] == [False] * 4 + [True] * 3


@pytest.mark.parametrize("compiled_is_faster", [True, False])
def test_one_way_may_serve_all(compiled_is_faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_that_takes(lambda rows, compiled: 1.0 + (compiled != compiled_is_faster), monkeypatch)
    choose_compiled(runner, runner.info.memory, TimeBox(60.0))
    assert runner.step.enabled == compiled_is_faster
    assert {runner.step.compiles_at(rows) for rows in range(1, 17)} == {compiled_is_faster}


def test_buckets_not_reached_in_time_do_as_the_nearest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(rows: int, compiled: bool) -> float:
        if rows == 1 and not compiled:
            monkeypatch.setattr(TimeBox, "is_over", True)
        return 4.0 if compiled else float(rows)

    box = TimeBox(60.0)
    runner = runner_that_takes(seconds, monkeypatch)
    assert list(choose_compiled(runner, runner.info.memory, box)) == [1, 16]
    assert [rows for rows in (1, 2, 4, 8, 16) if runner.step.compiles_at(rows)] == [16]


@pytest.mark.parametrize(("on_cpu", "compiled"), [(True, False), (False, True)])
def test_without_time_the_device_decides(
    on_cpu: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_choice, "on_cpu", lambda: on_cpu)
    runner = runner_that_takes(lambda *_: pytest.fail("was timed"), monkeypatch)
    assert choose_compiled(runner, runner.info.memory, TimeBox(0.0)) == {}
    assert runner.step.compiles_at(16) == compiled


def tokens_of_rows_that_come_and_go(rig: Rig) -> list[list[int]]:
    """Two rows, three, and two again."""
    driver = rig.driver(pipelined=True)
    rows = [driver.join((1, 2, 3)), driver.join((4, 5))]
    driver.prefill()
    for _ in range(3):
        driver.decode()
    rows.append(driver.join((6, 7, 8, 9)))
    driver.prefill()
    for _ in range(3):
        driver.decode()
    driver.leave(rows[0])
    for _ in range(3):
        driver.decode()
    driver.flush()
    return [row.output for row in rows]


def test_steps_run_as_their_bucket_says_and_only_compiled_ones_are_traced() -> None:
    rig, eager = (
        make_rig("llama", "in_place", compiled=compiled, max_rows=4, max_model_len=16)
        for compiled in (True, False)
    )
    step = rig.runner.step
    step.eager_at = frozenset([4])
    tuning.trace_buckets(rig.runner, rig.memory, TimeBox(60.0), ignore_progress)
    assert {bucket.num_rows for bucket in step._graphs} == {1, 2}
    before = step.compiled_steps, step.eager_steps
    assert tokens_of_rows_that_come_and_go(rig) == tokens_of_rows_that_come_and_go(eager)
    assert (step.compiled_steps - before[0], step.eager_steps - before[1]) == (6, 3)
    assert not step.wanted


@pytest.mark.parametrize(
    ("compile", "warmup_s", "note"),
    [
        ("on", 0.0, "on, as configured"),
        ("off", 0.0, "off, as configured"),
        ("auto", 0.0, "eager; there was no time to try"),
        ("auto", 30.0, r"1 row: \w+ \(compiled [\d.]+ ms, eager [\d.]+ ms\); 2 rows: .*"),
    ],
)
def test_status_says_how_steps_run(tmp_path: Path, compile: str, warmup_s: float, note: str) -> None:
    write_tiny_model(tmp_path)
    runner = load(tmp_path, compile=compile, attention="gathered", warmup_s=warmup_s)
    assert re.fullmatch(note, runner.info.notes["compile"])
