"""Rows that are dense until a length of their own and packed from then on: together, alone, by mlx-lm."""

from collections.abc import Sequence
from statistics import median_low

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import (
    CHUNK,
    ONE_CODE,
    PACKABLE,
    PAGE,
    UNPACKED_TOLERANCE,
    WATCHED,
    Rig,
    make_rig,
    pools_are_whole,
    prompt_of,
    run_together,
    seen,
)

from mlxd.batching.driver import Driver
from mlxd.batching.plan import RowResult
from mlxd.batching.row import Row
from mlxd.caches.delayed import DelayedRows
from mlxd.caches.kinds import native_caches, round_caches
from mlxd.caches.quantization import Quantization

FOUR_BITS = Quantization(bits=4, group_size=32, start=CHUNK + 3)
EIGHT_BITS = Quantization(bits=8, group_size=64, start=2 * CHUNK)
FORMATS = [FOUR_BITS, EIGHT_BITS]
BOUNDARY = 2 * CHUNK
"""Of both formats: their start, in whole chunks."""
NUM_TOKENS = 24
LENGTHS = [1, CHUNK, BOUNDARY - NUM_TOKENS + 1, BOUNDARY - 3, BOUNDARY, BOUNDARY + 1, BOUNDARY + 2, 50]
"""Rows that never get there, get there by decoding, by their last chunk, and that begin packed."""


def rig_of(family: str, quantization: Quantization = FOUR_BITS, *, compiled: bool = False) -> Rig:
    return make_rig(family, "in_place", quantization=quantization, compiled=compiled, max_rows=8)


def layers_of(rig: Rig) -> list[DelayedRows]:
    layers = [layer for layer in rig.runner._caches if isinstance(layer, DelayedRows)]
    assert layers
    return layers


def packed_bytes(rig: Rig, row: Row) -> bytes:
    """What a row holds in packed pages up to the boundary, where a window has not left it."""
    parts = []
    for layer, group in zip(layers_of(rig), rig.runner._layer_groups, strict=True):
        table = row.tables[group].successor
        assert table is not None
        pages = mx.array(table.pages[: max(0, BOUNDARY // PAGE - table.first_page)], dtype=mx.int32)
        parts += [np.array(plane[pages]).tobytes() for plane in layer.packed.planes]
    return b"".join(parts)


@pytest.mark.parametrize("quantization", FORMATS, ids=str)
@pytest.mark.parametrize("family", PACKABLE)
def test_rows_of_both_sorts_in_a_batch_equal_a_row_alone_bit_for_bit(
    family: str, quantization: Quantization
) -> None:
    rig = rig_of(family, quantization)
    prompts = [prompt_of(length) for length in LENGTHS]
    for prompt, results in zip(prompts, run_together(rig, prompts, NUM_TOKENS), strict=True):
        [alone] = run_together(rig, [prompt], NUM_TOKENS)
        assert seen(results) == seen(alone), f"prompt of {len(prompt)}"


def difference_from_mlx_lm(
    rig: Rig, quantization: Quantization, prompt: Sequence[int], ours: Sequence[RowResult], boundary: int
) -> float:
    """Of log-probabilities, from mlx-lm's caches that begin to round at `boundary`; both read our tokens."""
    caches = native_caches(rig.model)
    tokens = mx.array([[*prompt, *(result.token for result in ours[:-1])]])
    before = rig.model(tokens[:, :boundary], cache=caches)[0]
    round_caches(caches, quantization)
    logits = mx.concatenate([before, rig.model(tokens[:, boundary:], cache=caches)[0]])
    expected = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))[len(prompt) - 1 :]
    worst = 0.0
    for result, row in zip(ours, expected, strict=True):
        assert result.logprobs is not None
        ids, values = zip(*result.logprobs.top, strict=True)
        worst = max(worst, float(np.abs(np.array(values) - row[list(ids)]).max()))
    return worst


@pytest.mark.parametrize("quantization", FORMATS, ids=str)
@pytest.mark.parametrize("family", PACKABLE)
def test_a_row_is_dense_up_to_its_boundary_and_rounded_from_there(
    family: str, quantization: Quantization
) -> None:
    """Whichever way it got there. Neighbouring boundaries are told apart."""
    rig = rig_of(family, quantization)
    worst: dict[int, list[float]] = {BOUNDARY - 1: [], BOUNDARY: [], BOUNDARY + 1: []}
    for length in (BOUNDARY - 3, BOUNDARY, BOUNDARY + 1, 50):
        prompt = prompt_of(length)
        [results] = run_together(rig, [prompt], NUM_TOKENS)
        for boundary, found in worst.items():
            found.append(difference_from_mlx_lm(rig, quantization, prompt, results, boundary))
    assert max(worst[BOUNDARY]) < ONE_CODE
    assert median_low(worst[BOUNDARY]) < UNPACKED_TOLERANCE
    assert median_low(worst[BOUNDARY - 1]) > 20 * UNPACKED_TOLERANCE
    assert median_low(worst[BOUNDARY + 1]) > 20 * UNPACKED_TOLERANCE


def test_a_row_below_its_boundary_is_not_packed_at_all() -> None:
    rig, dense = rig_of("llama/64"), make_rig("llama/64", "in_place")
    prompt = prompt_of(BOUNDARY - 4)
    [before], [plain] = run_together(rig, [prompt], 5), run_together(dense, [prompt], 5)
    assert seen(before) == seen(plain)
    [after], [plain] = run_together(rig, [prompt], 8), run_together(dense, [prompt], 8)
    assert seen(after[:5]) == seen(plain[:5])
    assert seen(after[5:]) != seen(plain[5:])


ACTIONS = st.lists(st.sampled_from(["join", "join", "leave", "step", "step", "step"]), max_size=40)


@settings(max_examples=25, deadline=None)
@given(
    actions=ACTIONS, length=st.sampled_from(LENGTHS[2:]), family=st.sampled_from(["llama/64", "gpt_oss/64"])
)
def test_siblings_that_join_leave_and_are_shorter_never_move_a_rows_boundary(
    actions: list[str], length: int, family: str
) -> None:
    rig = rig_of(family)
    alone = _one_row_among(rig, length, [])
    assert _one_row_among(rig, length, actions) == alone


def _one_row_among(rig: Rig, length: int, actions: Sequence[str]) -> tuple[list[object], list[int], bytes]:
    """One row's draws, its floor after each step, and what it holds packed; beside what `actions` do."""
    driver = rig.driver()
    row = driver.join(prompt_of(length), WATCHED)
    results: list[RowResult] = []
    floors: list[int] = []
    todo = list(actions)
    driver.prefill([row])
    while len(results) < NUM_TOKENS:
        action = todo.pop(0) if todo else "step"
        if action == "join" and len(driver.rows) < 6:
            seed = len(todo)
            driver.prefill([driver.join(prompt_of(LENGTHS[seed % len(LENGTHS)], seed), WATCHED)])
        elif action == "leave" and len(driver.rows) > 1:
            driver.leave(driver.rows[-1])
        else:
            results += [result for result in driver.decode() if result.row_id == row.row_id]
            floors.append(layers_of(rig)[0].row_floors[driver.rows.index(row)])
    held = packed_bytes(rig, row)
    for other in list(driver.rows):
        driver.leave(other)
    assert pools_are_whole(driver)
    return seen(results), floors, held


@pytest.mark.parametrize("lengths", [(40, 50, 36), (33, 60, 35), (64, 17, 49)])
def test_a_cohort_that_prefills_together_is_packed_where_each_row_is_alone(lengths: Sequence[int]) -> None:
    rig = rig_of("mistral/64")
    prompts = [prompt_of(length) for length in lengths]
    assert [seen(r) for r in run_together(rig, prompts, NUM_TOKENS)] == [
        seen(run_together(rig, [prompt], NUM_TOKENS)[0]) for prompt in prompts
    ]


@pytest.mark.parametrize("quantization", FORMATS, ids=str)
@pytest.mark.parametrize("family", PACKABLE)
def test_a_row_that_is_recomputed_is_packed_where_it_was(family: str, quantization: Quantization) -> None:
    """Though what it had drawn is prompt now, and ends in another chunk."""
    rig = rig_of(family, quantization)
    for length in (BOUNDARY - 10, BOUNDARY - 1, BOUNDARY + 5):
        prompt = prompt_of(length)
        undisturbed = rig.generate(prompt, NUM_TOKENS).output
        for cut in (1, 10, 11, 20):
            resumed = rig.generate((*prompt, *undisturbed[:cut]), NUM_TOKENS - cut).output
            assert resumed == undisturbed[cut:]


@pytest.mark.parametrize("family", ["llama/64", "mistral/64"])
def test_compiled_equals_eager_across_the_boundary_without_a_retrace(family: str) -> None:
    drawn = []
    for compiled in (True, False):
        rig = rig_of(family, EIGHT_BITS, compiled=compiled)
        prompts = [prompt_of(length) for length in (BOUNDARY - 4, BOUNDARY - 8)]
        drawn.append([seen(results) for results in run_together(rig, prompts, 12)])
        counters = rig.runner.counters()
        assert (counters.compiled_steps > 0) == compiled
        assert (counters.graph_failures, counters.graph_retraces) == (0, 0)
        if compiled:
            widths = {bucket.split()[1] for bucket in counters.buckets}
            zeros = {tuple(width == "0" for width in text[6:].split("x")[:2]) for text in widths}
            assert zeros == {(False, True), (False, False), (True, False)}, "dense, mixed and packed graphs"
    assert drawn[0] == drawn[1]


def test_idle_steps_write_no_page_of_a_row() -> None:
    """Graphs are traced while rows are there."""
    rig = rig_of("mistral/64")
    driver = Driver(rig.runner, rig.memory)
    rows = [driver.join(prompt_of(length), WATCHED) for length in (BOUNDARY + 6, 9)]
    driver.prefill()
    driver.decode()
    pools = [array for layer in layers_of(rig) for array in layer.state()]
    before = [np.array(array[1:]) for array in pools]
    for dense, packed in ((3, 0), (0, 12), (8, 12)):
        widths = [dense if group.spec.until else packed for group in rig.memory.groups]
        rig.runner.trace(2, widths, WATCHED)
    after = [np.array(array[1:]) for layer in layers_of(rig) for array in layer.state()]
    for kept, found in zip(before, after, strict=True):
        np.testing.assert_array_equal(found, kept)
    for row in rows:
        driver.leave(row)
