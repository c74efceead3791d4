"""The decode step: compiled equals eager, and nothing that one row does reaches another."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import WATCHED, Rig, make_rig, oracle, prompt_of, stored_bytes

from mlxd.batching import decode
from mlxd.batching.driver import Driver
from mlxd.batching.mlx_step import MlxStep
from mlxd.batching.plan import DecodeEntry, PrefillChunk, RowResult, StepPlan
from mlxd.batching.sampling_params import SamplingParams
from mlxd.caches.page_pool import SCRATCH_PAGE
from mlxd.caches.row_group import row_bucket, width_bucket

VARIANTS = ("gathered", "in_place")
DRAWN = SamplingParams(temperature=0.8, top_logprobs=20)


def outcome(result: RowResult) -> tuple[object, ...]:
    """Token and log-probabilities, bit for bit."""
    return result.row_id, result.token, result.logprobs, result.fault


def run_traffic(driver: Driver, num_steps: int) -> list[tuple[tuple[object, ...], ...]]:
    """Up to four rows, one joining or leaving every third step; all that each step drew."""
    drawn = []
    for step in range(num_steps):
        if step % 3 == 0 and len(driver.rows) < 4:
            driver.join(prompt_of(step % 11 + 1, seed=step), DRAWN, seed=step)
            driver.prefill(driver.rows[-1:])
        elif step % 3 == 1 and len(driver.rows) > 1 and step % 4 == 0:
            driver.leave(driver.rows[step % len(driver.rows)])
        drawn.append(tuple(outcome(result) for result in driver.decode()))
        for row in [row for row in driver.rows if len(row.output) == 24]:
            driver.leave(row)
    return drawn


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("mistral", "gathered"),
        ("llama", "in_place"),
        pytest.param("gemma3_text", "in_place", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "gathered", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "in_place", marks=pytest.mark.slow),
    ],
)
def test_compiled_equals_eager_bit_for_bit_and_traces_each_bucket_once(family: str, attention: str) -> None:
    kwargs: dict[str, Any] = {"max_rows": 4, "max_model_len": 36, "page_size": 16}
    eager = make_rig(family, attention, **kwargs)
    compiled = make_rig(family, attention, **kwargs, compiled=True)

    assert run_traffic(compiled.driver(), 300) == run_traffic(eager.driver(), 300)

    counters = compiled.runner.counters()
    assert (counters.compiled_steps, counters.eager_steps) == (300, 0)
    assert counters.graph_retraces == 0
    assert counters.graph_compiles == len(set(counters.buckets)) <= num_reachable_buckets(compiled)
    run_traffic(compiled.driver(), 50)
    assert compiled.runner.counters().graph_compiles == counters.graph_compiles


def test_a_step_that_makes_a_graph_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig("llama", compiled=True, max_rows=4)
    launch, steps = rig.runner.launch, list[MlxStep]()

    def noted(plan: StepPlan) -> MlxStep:
        steps.append(launch(plan))
        return steps[-1]

    monkeypatch.setattr(rig.runner, "launch", noted)
    driver = rig.driver()
    for length in (9, 3, 5):
        driver.join(prompt_of(length), WATCHED)
        driver.prefill()
        driver.decode()
        driver.decode()
    decoding = [step.wait() for step in steps if step.plan.decode]
    assert [result.traced for result in decoding] == [True, False] * 3
    assert not any(step.wait().traced for step in steps if not step.plan.decode)


def num_reachable_buckets(rig: Rig) -> int:
    """Row buckets times page-table widths."""
    rows = {row_bucket(n) for n in range(1, rig.memory.max_rows + 1)}
    widths = 1
    for group in rig.memory.groups:
        most = group.spec.pages_for(rig.memory.max_model_len, rig.memory.chunk)
        widths *= len({width_bucket(n) for n in range(1, most + 1)})
    return len(rows) * widths


def test_a_graph_that_fails_is_retired_and_no_row_notices(caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig("llama", compiled=True, max_rows=2)
    driver = rig.driver()
    rows = [driver.join(prompt_of(length), WATCHED) for length in (9, 3)]
    driver.prefill()
    driver.decode()
    break_graphs(rig)

    for _ in range(3):
        driver.decode()

    assert [tuple(row.output) for row in rows] == [oracle("llama", tuple(r.prompt), 4).tokens for r in rows]
    counters = rig.runner.counters()
    assert (counters.graph_compiles, counters.graph_failures) == (1, 1)
    assert (counters.compiled_steps, counters.eager_steps) == (1, 3)
    assert counters.buckets == ()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def break_graphs(rig: Rig) -> None:
    def fail(*arrays: mx.array) -> list[mx.array]:
        raise RuntimeError("no kernel for this")

    graphs = rig.runner.step._graphs
    for bucket in graphs:
        graphs[bucket] = fail


def biased(width: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(range(width), 0.0))


def trace_biased(rig: Rig, *widths: int) -> None:
    """Steps of one row with so many biases, each width a graph of its own."""
    for width in widths:
        rig.runner.trace(1, [1] * len(rig.memory.groups), biased(width))


def sampling_of(rig: Rig) -> list[str]:
    """Of the graphs that are there, the latest used last."""
    return [bucket.sampling.label for bucket in rig.runner.step._graphs]


def test_graphs_are_bounded_and_one_that_went_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients choose what a graph holds: they could fill the memory with them."""
    monkeypatch.setattr(decode, "MOST_GRAPHS", 3)
    rig = make_rig("llama", "in_place", compiled=True, max_rows=1)
    trace_biased(rig, 0, 1, 2)
    trace_biased(rig, 0, 4)
    assert sampling_of(rig) == ["bias2", "greedy", "bias4"]
    assert rig.runner.counters().graph_compiles == 4
    trace_biased(rig, 1, 4)
    assert sampling_of(rig) == ["greedy", "bias1", "bias4"]
    counters = rig.runner.counters()
    assert len(counters.buckets) == 3
    assert (counters.graph_compiles, counters.graph_retraces, counters.graph_failures) == (5, 0, 0)


def test_buckets_that_wait_to_be_traced_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MOST_WANTED", 2)
    rig = make_rig("llama", "in_place", compiled=True, max_rows=1)
    rig.runner._trace_bound_s = -1.0
    driver = rig.driver()
    for width in (0, 1, 2):
        row = driver.join((1,), biased(width))
        driver.decode()
        driver.leave(row)
    assert [bucket.sampling.label for bucket in rig.runner.step.wanted] == ["bias1", "bias2"]
    assert [rig.runner.maintain() for _ in range(2)] == [True, False]
    assert sampling_of(rig) == ["bias1", "bias2"]


@pytest.mark.parametrize("attention", VARIANTS)
@pytest.mark.parametrize("num_rows", [2, 3, 8])
def test_identical_prompts_stay_bit_equal_in_all_rows(num_rows: int, attention: str) -> None:
    rig = make_rig("gemma3_text", attention)
    driver = rig.driver()
    rows = [driver.join(prompt_of(13), WATCHED) for _ in range(num_rows)]
    driver.prefill()

    for _ in range(12):
        results = [outcome(result)[1:] for result in driver.decode()]
        assert results == [results[0]] * num_rows
    stored = {stored_bytes(rig, row, len(row.prompt) + len(row.output) - 1) for row in rows}
    assert len(stored) == 1


def poison(rig: Rig, pages: Callable[[int], Sequence[int]]) -> None:
    """Fill pages(group) of every layer with NaN."""
    for layer, group in zip(rig.runner._caches, rig.runner._layer_groups, strict=True):
        index = mx.array(list(pages(group)), dtype=mx.int32)
        layer.keys[index] = mx.array(float("nan"))
        layer.values[index] = mx.array(float("nan"))


@pytest.mark.parametrize("attention", VARIANTS)
def test_idle_rows_and_the_scratch_page_reach_no_row(attention: str) -> None:
    """Three rows of unequal length in a bucket of four; whatever the scratch page holds, none reads it."""
    rig = make_rig("gemma3_text", attention, max_rows=4)
    driver = rig.driver()
    rows = [driver.join(prompt_of(length), WATCHED) for length in (1, 9, 24)]
    driver.prefill()

    for _ in range(10):
        poison(rig, lambda group: [SCRATCH_PAGE])
        assert all(result.fault is None for result in driver.decode())
    for row in rows:
        assert tuple(row.output) == oracle("gemma3_text", tuple(row.prompt), 10).tokens


@pytest.mark.parametrize("attention", VARIANTS)
def test_a_row_that_is_not_finite_fails_alone_and_leaves_no_trace_in_its_pages(attention: str) -> None:
    """Sick rows come and go until their pages went round; siblings grow into pages that held NaN."""
    rig = make_rig("gemma3_text", attention, max_rows=3, max_model_len=40)
    driver = rig.driver()
    healthy = [driver.join(prompt_of(length), WATCHED) for length in (8, 24)]
    driver.prefill()
    handed: list[int] = []

    for _ in range(14):
        sick = driver.join(prompt_of(12), WATCHED)
        driver.prefill([sick])
        poison(rig, lambda group, sick=sick: sick.tables[group].pages)  # type: ignore[misc]
        handed += sick.tables[0].pages
        assert [result.fault for result in driver.decode()] == [None, None, "numeric"]
        driver.leave(sick)

    assert len(handed) > len(set(handed)), "no page was handed out twice"
    for row in healthy:
        assert tuple(row.output) == oracle("gemma3_text", tuple(row.prompt), 14).tokens


def test_arrays_that_a_model_keeps_are_not_changed_by_later_steps() -> None:
    """Models keep a handle of `cache.offset`; a step gets new arrays, it does not move the old ones."""
    rig = make_rig("llama")
    model, kept = rig.runner.step._model, []

    def keeping(tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        kept.append([layer.offset for layer in cache])
        logits: mx.array = model(tokens, cache=cache)
        return logits

    rig.runner.step._model = keeping  # type: ignore[assignment]
    driver = rig.driver()
    for length in (3, 6):
        driver.join(prompt_of(length), WATCHED)
    driver.prefill()
    for _ in range(4):
        driver.decode()

    seen = [[np.array(offset).tolist() for offset in offsets] for offsets in kept]
    assert seen == [[[2 + step, 5 + step]] * 2 for step in range(4)]


def test_a_position_without_a_page_raises_before_anything_runs() -> None:
    rig = make_rig("llama", max_rows=2)
    driver = rig.driver()
    row = driver.join(prompt_of(4), WATCHED)
    driver.prefill()
    driver.decode()
    before = stored_bytes(rig, row, 4)
    end = row.tables[0].end

    with pytest.raises(IndexError, match=rf"position {end} is outside the pages held, \[0, {end}\)"):
        rig.runner.launch(StepPlan(99, decode=(DecodeEntry(row, end, 1, None),)))
    with pytest.raises(IndexError, match="outside the pages held"):
        rig.runner.launch(StepPlan(99, prefill=(PrefillChunk(row, 0, end + 1, (0,) * (end + 1)),)))
    with pytest.raises(IndexError, match="not a multiple of the page size"):
        rig.runner.launch(StepPlan(99, prefill=(PrefillChunk(row, 1, 3, (0, 0)),)))

    assert stored_bytes(rig, row, 4) == before
    driver.decode()
    assert tuple(row.output) == oracle("llama", tuple(row.prompt), 2).tokens


def test_tables_on_the_device_follow_rows_that_come_and_go() -> None:
    rig = make_rig("llama", max_rows=2, max_model_len=16)
    driver = rig.driver()
    for length in (6, 9, 5, 12, 7):
        first = driver.join(prompt_of(length), WATCHED)
        second = driver.join(prompt_of(length + 1), WATCHED)
        driver.prefill()
        for _ in range(3):
            driver.decode()
        for row in (first, second):
            assert tuple(row.output) == oracle("llama", tuple(row.prompt), 3).tokens
            driver.leave(row)
