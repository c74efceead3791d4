"""Models on packed keys and values: batch, row alone, mlx-lm's quantised cache and a rounding oracle."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache
from scheduling import World, make_config, submission
from tiny_models import (
    CHUNK,
    FAMILIES,
    ONE_CODE,
    PACKABLE,
    PAGE,
    UNPACKED_TOLERANCE,
    WATCHED,
    make_rig,
    prompt_of,
    run_together,
    seen,
)

from mlxd.batching.driver import Driver
from mlxd.batching.plan import RowResult
from mlxd.caches.kinds import native_caches, rounded_caches
from mlxd.caches.quantization import Quantization
from mlxd.scheduler.events import Finished, Tokens

NUM_TOKENS = 20
FOUR_BITS = Quantization(bits=4, group_size=32)
EIGHT_BITS = Quantization(bits=8, group_size=64)
FORMATS = [FOUR_BITS, EIGHT_BITS]


def window_of(family: str) -> int:
    return FAMILIES[family.removesuffix("/64")].window or 2 * PAGE


def edge_prompts(family: str) -> list[tuple[int, ...]]:
    """Prompts at the edges of pages and of the family's window."""
    window = window_of(family)
    lengths = {1, PAGE - 1, PAGE, PAGE + 1, window - 1, window, window + 1, 3 * window}
    return [prompt_of(length) for length in sorted(lengths)]


def largest_difference(
    model: nn.Module, caches: list[object], prompt: Sequence[int], ours: list[RowResult]
) -> float:
    """Of log-probabilities, from mlx-lm's over `caches`; both read our tokens."""
    if len(prompt) > 1:
        model(mx.array([prompt[:-1]]), cache=caches)
    token, worst = prompt[-1], 0.0
    for result in ours:
        logits = model(mx.array([[token]]), cache=caches)[0, -1]
        expected = np.array(logits - mx.logsumexp(logits))
        assert result.logprobs is not None
        ids, values = zip(*result.logprobs.top, strict=True)
        worst = max(worst, float(np.abs(np.array(values) - expected[list(ids)]).max()))
        token = result.token
    return worst


@pytest.mark.parametrize("quantization", FORMATS, ids=str)
@pytest.mark.parametrize("family", PACKABLE)
def test_rows_in_a_batch_equal_a_row_alone_bit_for_bit(family: str, quantization: Quantization) -> None:
    rig = make_rig(family, quantization=quantization)
    prompts = edge_prompts(family)
    for prompt, results in zip(prompts, run_together(rig, prompts, NUM_TOKENS), strict=True):
        [alone] = run_together(rig, [prompt], NUM_TOKENS)
        assert seen(results) == seen(alone), f"prompt of {len(prompt)}"


@pytest.mark.parametrize("quantization", FORMATS, ids=str)
@pytest.mark.parametrize("family", PACKABLE)
def test_attention_reads_what_packing_leaves_of_each_number(family: str, quantization: Quantization) -> None:
    """Windows and sinks included, which mlx-lm's own quantised cache does not have."""
    rig = make_rig(family, quantization=quantization)
    prompts = edge_prompts(family)
    worst = [
        largest_difference(rig.model, rounded_caches(rig.model, quantization), prompt, results)
        for prompt, results in zip(prompts, run_together(rig, prompts, NUM_TOKENS), strict=True)
    ]
    assert max(worst) < ONE_CODE
    assert np.median(worst) < UNPACKED_TOLERANCE


@pytest.mark.parametrize("quantization", FORMATS, ids=str)
@pytest.mark.parametrize("family", ["llama/64", "qwen3/64"])
def test_full_attention_equals_mlx_lms_quantised_cache(family: str, quantization: Quantization) -> None:
    rig = make_rig(family, quantization=quantization)
    prompts = edge_prompts(family)
    worst = []
    for prompt, results in zip(prompts, run_together(rig, prompts, NUM_TOKENS), strict=True):
        caches: list[object] = [
            QuantizedKVCache(quantization.group_size, quantization.bits) for _ in rig.model.layers
        ]
        worst.append(largest_difference(rig.model, caches, prompt, results))
    assert max(worst) < ONE_CODE
    assert np.median(worst) < UNPACKED_TOLERANCE


@pytest.mark.parametrize("family", PACKABLE)
def test_precision_shows(family: str) -> None:
    """Guards the tests above: four bits are told from full precision."""
    prompt = prompt_of(3 * window_of(family))
    rig = make_rig(family, quantization=FOUR_BITS)
    [results] = run_together(rig, [prompt], NUM_TOKENS)
    assert largest_difference(rig.model, native_caches(rig.model), prompt, results) > ONE_CODE


@pytest.mark.parametrize("family", ["llama/64", "mistral/64"])
def test_compiled_equals_eager_while_rows_join_and_leave(family: str) -> None:
    drawn = []
    for compiled in (True, False):
        rig = make_rig(family, compiled=compiled, max_rows=4, page_size=16, quantization=EIGHT_BITS)
        drawn.append(_traffic(rig.driver(), 60))
        counters = rig.runner.counters()
        assert (counters.compiled_steps > 0, counters.graph_failures, counters.graph_retraces) == (
            compiled,
            0,
            0,
        )
    assert drawn[0] == drawn[1]


def _traffic(driver: Driver, num_steps: int) -> list[list[object]]:
    """Up to four rows, one joining or leaving every third step."""
    drawn = []
    for step in range(num_steps):
        if step % 3 == 0 and len(driver.rows) < 4:
            driver.join(prompt_of(step % 11 + 1, seed=step), WATCHED)
            driver.prefill(driver.rows[-1:])
        elif step % 3 == 1 and len(driver.rows) > 1 and step % 4 == 0:
            driver.leave(driver.rows[step % len(driver.rows)])
        drawn.append(seen(driver.decode()))
    return drawn


@pytest.mark.parametrize("family", PACKABLE)
def test_siblings_that_join_and_leave_change_nothing(family: str) -> None:
    rig = make_rig(family, quantization=FOUR_BITS)
    prompt = prompt_of(3 * window_of(family))
    [alone] = run_together(rig, [prompt], NUM_TOKENS)
    driver = rig.driver()
    row, together = driver.join(prompt, WATCHED), []
    driver.prefill()
    for step in range(NUM_TOKENS):
        if step % 3 == 0:
            driver.prefill([driver.join(prompt_of(step + 1, seed=step), WATCHED)])
        if step % 5 == 4:
            driver.leave(driver.rows[1])
        together.append(next(result for result in driver.decode() if result.row_id == row.row_id))
    assert seen(together) == seen(alone)


@pytest.mark.parametrize("quantization", FORMATS, ids=str)
@pytest.mark.parametrize("family", ["llama/64", "qwen3/64"])
def test_a_shared_prefix_is_shared_packed(family: str, quantization: Quantization) -> None:
    rig = make_rig(family, quantization=quantization)
    prompts = [
        prompt_of(3 * CHUNK, seed=5)[:length] + prompt_of(3, seed=length) for length in (48, 30, 21, 5)
    ]
    warm = World(make_config(), rig.runner)
    answers = [_serve(warm, str(i), prompt) for i, prompt in enumerate(prompts)]
    reused = [e.usage.cached_tokens for e in warm.events if isinstance(e, Finished)]
    assert reused == [0, 28, 20, 4]
    for prompt, answer in zip(prompts, answers, strict=True):
        rig.runner.reset()
        assert _serve(World(make_config(), rig.runner), "cold", prompt) == answer


def _serve(world: World, request_id: str, prompt: tuple[int, ...]) -> list[object]:
    """Run it alone to its end; tokens and log-probabilities."""
    before = len(world.events)
    world.submit(submission(request_id, prompt, max_tokens=6, temperature=0.0, top_logprobs=20))
    world.run()
    return [(e.token_ids, e.logprobs) for e in world.events[before:] if isinstance(e, Tokens)]


@pytest.mark.parametrize("family", PACKABLE)
def test_a_row_that_is_recomputed_goes_on_as_if_undisturbed(family: str) -> None:
    """A resumed row is a row with a longer prompt: its positions are packed in prefill, not one by one."""
    rig = make_rig(family, quantization=EIGHT_BITS)
    prompt = prompt_of(2 * PAGE + 1)
    undisturbed = rig.generate(prompt, NUM_TOKENS).output
    for cut in (1, PAGE, 2 * PAGE + 3):
        resumed = rig.generate((*prompt, *undisturbed[:cut]), NUM_TOKENS - cut).output
        assert resumed == undisturbed[cut:]
