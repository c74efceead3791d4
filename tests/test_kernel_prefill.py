"""Prefill beside attention that keeps its pools: it writes into them, or waits until nothing holds them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cpu_kernel import use_numpy_kernels
from scheduling import World, answer_of, make_config, submission
from tiny_models import Rig, make_rig, oracle, prompt_of, stored_bytes

from mlxd.batching import chunk_kernel
from mlxd.batching.driver import Driver
from mlxd.batching.mlx_step import MlxStep
from mlxd.batching.plan import PrefillChunk, RestoredPage, StepPlan
from mlxd.batching.row import Row
from mlxd.caches.quantization import Quantization
from mlxd.scheduler.events import Finished, RequestKey

FAMILY, OUTPUT = "llama/64", 12
ODD = "llama"
"""Its heads are 8 wide, which the kernel does not serve."""
FAMILIES = ["llama/64", "mistral/64", "gemma3_text/64", "gpt_oss/64"]
RUNNING, JOINING = prompt_of(21), prompt_of(45, seed=1)


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_kernels(monkeypatch)


def rig_of(family: str = FAMILY, attention: str = "kernel") -> Rig:
    return make_rig(family, attention, page_size=16)


def in_flight(rig: Rig) -> tuple[Driver, Row, MlxStep]:
    """A row, and the step in flight that decodes it."""
    driver = rig.driver()
    row = driver.join(RUNNING)
    driver.prefill()
    return driver, row, rig.runner.launch(StepPlan(1, decode=(driver._entry(row),)))


def next_chunk(driver: Driver) -> PrefillChunk:
    chunk = driver._next_chunk(driver.join(JOINING))
    assert chunk is not None
    return chunk


def prefill(driver: Driver) -> StepPlan:
    return StepPlan(2, prefill=(next_chunk(driver),))


def nothing(driver: Driver) -> StepPlan:
    return StepPlan(2)


def scrub(driver: Driver) -> StepPlan:
    return StepPlan(2, scrub=tuple(tuple(pool.allocate(1)) for pool in driver.pools))


def scrub_and_prefill(driver: Driver) -> StepPlan:
    return StepPlan(2, prefill=(next_chunk(driver),), scrub=scrub(driver).scrub)


def copy(driver: Driver) -> StepPlan:
    return StepPlan(2, copies=tuple(((1, *pool.allocate(1)),) for pool in driver.pools))


def restore(driver: Driver) -> StepPlan:
    (page,) = driver.pools[0].allocate(1)
    runner = driver._runner
    (payload,) = runner.export_pages([(0, 1)])
    return StepPlan(2, restored=(RestoredPage(0, page, memoryview(payload)),))


@pytest.mark.parametrize(
    ("family", "attention", "plan", "waits"),
    [
        (FAMILY, "kernel", nothing, False),
        (FAMILY, "kernel", prefill, False),
        (FAMILY, "kernel", scrub, True),
        (FAMILY, "kernel", scrub_and_prefill, True),
        (FAMILY, "kernel", copy, True),
        (FAMILY, "kernel", restore, True),
        (ODD, "kernel", prefill, True),
        (ODD, "kernel", nothing, False),
        (FAMILY, "in_place", scrub_and_prefill, False),
        (FAMILY, "gathered", prefill, False),
    ],
)
def test_a_step_waits_for_the_one_in_flight_where_it_replaces_pools_that_are_kept(
    family: str, attention: str, plan: Callable[[Driver], StepPlan], waits: bool
) -> None:
    rig = rig_of(family, attention)
    driver, row, first = in_flight(rig)
    rest = plan(driver)
    second = rig.runner.launch(
        StepPlan(2, (driver._entry(row),), rest.prefill, rest.scrub, (), rest.restored, rest.copies)
    )
    assert (first._result is not None) == waits
    assert first.wait() is first.wait()
    assert len(second.wait().rows) == 1


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        pytest.param(FAMILY, [(1, False), (16, False)], id="written in place: decoding runs meanwhile"),
        pytest.param(ODD, [(16, False), (1, True)], id="replaced: a decode step would hold the pools"),
    ],
)
def test_which_forward_comes_first_and_whether_it_is_built_after_the_wait(
    family: str, expected: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens a row of each forward of a step, and whether the step in flight had been waited for."""
    rig = rig_of(family)
    driver, row, first = in_flight(rig)
    seen: list[tuple[int, bool]] = []
    forward = type(rig.model).__call__

    def noted(self: object, tokens: mx.array, *arguments: object, **named: object) -> mx.array:
        seen.append((tokens.shape[1], first._result is not None))
        result: mx.array = forward(self, tokens, *arguments, **named)
        return result

    monkeypatch.setattr(type(rig.model), "__call__", noted)
    rig.runner.launch(StepPlan(2, (driver._entry(row),), (next_chunk(driver),))).wait()
    assert seen == expected


def test_rows_that_are_packed_on_their_way_are_prefilled_when_nothing_holds_the_pools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Packing reads dense pages that the same forward writes, and is evaluated while that is built."""
    quantization = Quantization(bits=8, group_size=32, start=16)
    rig = make_rig(FAMILY, "kernel", page_size=16, quantization=quantization)
    driver, row, first = in_flight(rig)
    forward = type(rig.model).__call__

    def waited(self: object, *arguments: object, **named: object) -> mx.array:
        assert first._result is not None
        result: mx.array = forward(self, *arguments, **named)
        return result

    chunk, entry = next_chunk(driver), driver._entry(row)
    monkeypatch.setattr(type(rig.model), "__call__", waited)
    rig.runner.launch(StepPlan(2, (entry,), (chunk,))).wait()
    assert not rig.runner.attention.writer.cases  # type: ignore[union-attr]


def test_pages_zeroed_for_a_later_step_are_not_left_to_one_beside_the_step_in_flight() -> None:
    rig = rig_of()
    driver, _, first = in_flight(rig)
    rig.runner.launch(scrub(driver))
    assert first._result is not None


def test_where_only_some_steps_keep_the_pools_prefill_replaces_them() -> None:
    """The others would copy what a prefill in flight holds."""
    rig = rig_of()
    rig.runner.set_attention("kernel", {1: "in_place"})
    driver, row, first = in_flight(rig)
    rig.runner.launch(StepPlan(2, (driver._entry(row),), (next_chunk(driver),))).wait()
    assert first._result is not None


def addresses(rig: Rig) -> list[int]:
    """Where each pool lies."""
    return [np.array(pool, copy=False).ctypes.data for cache in rig.runner._caches for pool in cache.planes]


def test_pools_stay_the_arrays_they_are() -> None:
    rig = rig_of()
    before = addresses(rig)
    driver, row, _ = in_flight(rig)
    rig.runner.launch(StepPlan(2, (driver._entry(row),), (next_chunk(driver),))).wait()
    assert addresses(rig) == before


def serve(rig: Rig) -> list[Row]:
    """A row that decodes while others come: of several chunks, alone and at once. Pipelined by one step."""
    driver = rig.driver()
    running = driver.join(RUNNING)
    driver.prefill()
    joining = [driver.join(prompt_of(length, seed=length)) for length in (45, 9, 12, 70)]
    pending: MlxStep | None = None
    while chunks := tuple(chunk for row in joining if (chunk := driver._next_chunk(row)) is not None):
        step = rig.runner.launch(StepPlan(0, decode=(driver._entry(running),), prefill=chunks))
        if pending is not None:
            driver._finish(pending)
        pending = step
    assert pending is not None
    driver._finish(pending)
    for _ in range(OUTPUT):
        driver.decode()
    return [running, *joining]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["kernel", "in_place"])
def test_rows_that_are_prefilled_beside_others_draw_what_mlx_lm_draws(family: str, attention: str) -> None:
    for row in serve(rig_of(family, attention)):
        assert tuple(row.output) == oracle(family, tuple(row.prompt), len(row.output)).tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_no_evaluation_reads_what_it_writes_in_place(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX sees no order between the two; here all is written last."""
    write, evaluate = chunk_kernel.kernel(), mx.async_eval
    waiting: list[dict[str, Any]] = []

    def launch(**arguments: Any) -> list[mx.array]:
        waiting.append(arguments)
        return [mx.zeros((1,))]

    def evaluate_and_write(*arrays: mx.array) -> None:
        evaluate(*arrays)
        while waiting:
            write(**waiting.pop())

    monkeypatch.setattr(chunk_kernel, "kernel", lambda: launch)
    monkeypatch.setattr(mx, "async_eval", evaluate_and_write)
    for row in serve(rig_of(family)):
        assert tuple(row.output) == oracle(family, tuple(row.prompt), len(row.output)).tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_in_place_is_stored_as_what_replaces_pools(family: str) -> None:
    stored = []
    for in_place in (True, False):
        rig = rig_of(family)
        if not in_place:
            rig.runner._writer = None
        stored.append([stored_bytes(rig, row, len(row.prompt) - 1) for row in serve(rig)[1:]])
    assert stored[0] == stored[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_are_cancelled_preempted_and_begin_with_known_pages_leave_the_others_right(
    family: str,
) -> None:
    """Their pages are handed on while steps are in flight, and zeroed beside chunks that are written."""
    rig = make_rig(family, "kernel", page_size=16, budget_bytes=5 * 2**17)
    world = World(make_config(overcommit=8.0), rig.runner)
    document = prompt_of(60, seed=9)
    asked = {str(i): (*document[: 7 * i % 53], *prompt_of(1 + i % 9, seed=i)) for i in range(24)}
    for i, (name, prompt) in enumerate(asked.items()):
        world.submit(submission(name, prompt, max_tokens=9 + i % 13, temperature=0.0))
        for _ in range(i % 4):
            world.turn()
        if i % 6 == 5:
            world.cancel(RequestKey("acme", str(i - 1)))
    world.run()
    ends = {event.key.request_id: event.outcome for event in world.events if isinstance(event, Finished)}
    assert Counter(ends.values()) == {"length": 20, "cancelled": 4}
    assert any(step.preemptions for step in world.tape.steps)
    assert any(sum(step.prefix_hit_tokens.values()) for step in world.tape.steps)
    for name, prompt in asked.items():
        drawn = tuple(answer_of(world, name)[0])
        assert drawn == oracle(family, prompt, len(drawn)).tokens
