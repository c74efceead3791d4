"""Long answers: compiled and eager, through the scheduler as mlx-lm, and from pages that were restored."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from scheduling import World, make_config, serve, submission
from test_disk_restart import start
from tiny_models import CHUNK, PAGE, WATCHED, Rig, make_rig, oracle, prompt_of, seen

from mlxd.caches.paged_view import write_position
from mlxd.caches.quantization import Quantization
from mlxd.scheduler.events import Tokens

FOUR_BITS = Quantization(bits=4, group_size=32)
LATE = Quantization(bits=4, group_size=32, start=200)


def answer(rig: Rig, num_tokens: int) -> list[object]:
    driver = rig.driver(pipelined=True)
    driver.join(prompt_of(9), WATCHED)
    driver.prefill()
    drawn = [result for _ in range(num_tokens) for result in driver.decode()]
    return seen([*drawn, *driver.flush()])


@pytest.mark.parametrize(
    ("family", "quantization", "num_tokens"),
    [
        ("llama", None, 600),
        ("llama/64", FOUR_BITS, 600),
        ("mistral/64", LATE, 300),
        pytest.param("gemma3_text", None, 1100, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_long_answer_is_compiled_throughout_and_equals_the_eager_one(
    family: str, quantization: Quantization | None, num_tokens: int
) -> None:
    """Bit for bit, through every width of its page tables, without a retrace."""
    drawn = []
    for compiled in (True, False):
        rig = make_rig(
            family,
            "in_place",
            compiled=compiled,
            max_rows=1,
            max_model_len=1280,
            page_size=64,
            quantization=quantization,
            budget_bytes=2**24,
        )
        drawn.append(answer(rig, num_tokens))
        counters = rig.runner.counters()
        assert (counters.compiled_steps, counters.eager_steps) == (num_tokens, 0)[:: 1 if compiled else -1]
        assert (counters.graph_retraces, counters.graph_failures) == (0, 0)
    assert len(drawn[0]) == num_tokens
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("family", ["gemma3_text", "mistral"])
def test_three_rows_wrap_their_windows_through_the_scheduler_as_mlx_lm_does(family: str) -> None:
    """The likeliest 20 tokens of 48 steps. No experts: in so many, two of them will tie nearly."""
    lengths = (1, 9, 30)
    rig = make_rig(family, "in_place")
    world = World(make_config(), rig.runner)
    for length in lengths:
        wanted = {"max_tokens": 48, "temperature": 0.0, "top_logprobs": 20, "ignore_eos": True}
        world.submit(submission(str(length), prompt_of(length), **wanted))
    world.run()
    for length in lengths:
        events = [e for e in world.events if isinstance(e, Tokens) and e.key.request_id == str(length)]
        expected = oracle(family, prompt_of(length), 48)
        assert tuple(token for event in events for token in event.token_ids) == expected.tokens
        found = [logprobs for event in events for logprobs in event.logprobs]
        for drawn, row in zip(found, expected.logprobs, strict=True):
            ids, values = zip(*drawn.top, strict=True)
            np.testing.assert_allclose(values, row[list(ids)], rtol=0, atol=1e-4)


def test_the_first_thing_done_with_restored_pages_may_be_a_compiled_step(tmp_path: Path) -> None:
    prompt = prompt_of(2 * CHUNK + 1, seed=8)
    cold, tier = start(make_rig("llama", "in_place", compiled=True), tmp_path)
    expected = serve(cold, "cold", prompt)
    tier.close()

    rig = make_rig("llama", "in_place", compiled=True)
    warm, tier = start(rig, tmp_path)
    assert serve(warm, "warm", prompt) == expected
    tier.close()
    assert tier.stats.pages["loaded"] == 2 * CHUNK // PAGE
    assert warm.plans[0] == [("decode", 1, 2 * CHUNK)]
    assert (rig.runner.counters().compiled_steps, rig.runner.counters().eager_steps) == (6, 0)


OFFSETS = (0, 1, 7, 8, 40, 255, 256)


def test_a_rotation_by_an_array_of_positions_is_that_by_each_number() -> None:
    """Steps get positions as an array; a model alone, and mlx-lm, have a Python number."""
    x = mx.random.normal((len(OFFSETS), 2, 1, 16), key=mx.random.key(0))
    together = mx.fast.rope(
        x, 16, traditional=False, base=1e4, scale=1.0, offset=mx.array(OFFSETS, dtype=mx.int32)
    )
    for row, offset in enumerate(OFFSETS):
        alone = mx.fast.rope(x[row : row + 1], 16, traditional=False, base=1e4, scale=1.0, offset=offset)
        np.testing.assert_array_equal(np.array(together[row : row + 1]), np.array(alone))


def test_a_write_at_an_index_in_an_array_is_that_at_a_number() -> None:
    new = mx.random.normal((2, 3, 1, 5), key=mx.random.key(1))
    pool = mx.zeros((6, 3, 4, 5))
    places = [(2, 0), (5, 3)]
    expected = np.zeros(pool.shape, np.float32)
    for row, (page, column) in enumerate(places):
        expected[page, :, column] = np.array(new[row, :, 0])
    flat = [(page * 3 + head) * 4 + column for page, column in places for head in range(3)]
    written = write_position(pool, new, mx.array(flat, dtype=mx.int32)[:, None])
    np.testing.assert_array_equal(np.array(written), expected)
