"""Rows in a batch, a row alone, and mlx-lm: the same tokens."""

from collections.abc import Sequence

import numpy as np
import pytest
from tiny_models import (
    FAMILIES,
    VOCAB,
    Oracle,
    edge_lengths,
    make_rig,
    oracle,
    prompt_of,
    run_together,
    seen,
    tiny_model,
)

from mlxd.batching.plan import RowResult

NUM_TOKENS = 20
TOLERANCE = 1e-4
VARIANTS = ("gathered", "in_place")


def assert_matches(results: Sequence[RowResult], expected: Oracle) -> None:
    assert tuple(result.token for result in results) == expected.tokens
    for result, logprobs in zip(results, expected.logprobs, strict=True):
        assert result.logprobs is not None
        ids, values = zip(*result.logprobs.top, strict=True)
        np.testing.assert_allclose(values, logprobs[list(ids)], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("attention", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_in_a_batch_equal_a_row_alone_and_mlx_lm(family: str, attention: str) -> None:
    prompts = [prompt_of(length) for length in edge_lengths(family)]
    rig = make_rig(family, attention)

    together = run_together(rig, prompts, NUM_TOKENS)

    for prompt, results in zip(prompts, together, strict=True):
        [alone] = run_together(rig, [prompt], NUM_TOKENS)
        assert seen(results) == seen(alone), f"prompt of {len(prompt)}"
        assert_matches(results, oracle(family, prompt, NUM_TOKENS))


@pytest.mark.parametrize("family", FAMILIES)
def test_models_answer_by_their_whole_context(family: str) -> None:
    """Guards the tests above: an attention that loses an old position must show."""
    prompt = list(prompt_of(5))
    expected = oracle(family, tuple(prompt), 1).logprobs[0]
    for position in range(len(prompt) - 1):
        changed = [*prompt]
        changed[position] = (changed[position] + 1) % VOCAB
        shifted = oracle(family, tuple(changed), 1).logprobs[0]
        assert np.abs(shifted - expected).max() > 100 * TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_models_do_not_answer_by_one_token_alone(family: str) -> None:
    tokens = oracle(family, prompt_of(5), 40).tokens
    assert len(set(tokens)) > 5
    assert tiny_model(family) is tiny_model(family)
