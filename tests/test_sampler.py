"""The sampler's graph against float64 oracles."""

import mlx.core as mx
import numpy as np
import pytest

from mlxd.batching.sampler import SamplingShape, inverse_cdf, kept_weights, sample

VOCAB = 600
LAST_UNIFORM = 1 - 2**-24


def _logits(kind: str) -> np.ndarray:
    """[4, VOCAB] float32."""
    rng = np.random.default_rng(7)
    normal = rng.normal(size=(4, VOCAB)).astype(np.float32)
    match kind:
        case "normal":
            return normal
        case "peaked":
            return normal * 8
        case "ties":
            return np.round(normal)
        case "close":
            return normal * np.float32(1e-6)
        case "uniform":
            return np.full_like(normal, -3)
        case "one_hot":
            return np.where(np.arange(VOCAB) == 17, np.float32(1e4), np.float32(-1e4)) + 0 * normal
        case "barred":
            return np.where(rng.random(normal.shape) < 0.9, -np.inf, normal)
        case "one_allowed":
            return np.where(np.arange(VOCAB) == VOCAB - 1, normal, -np.inf)
        case "huge":
            return normal * np.float32(5e37)
    raise ValueError(kind)


KINDS = ("normal", "peaked", "ties", "close", "uniform", "one_hot", "barred", "one_allowed", "huge")
FILTERS = (
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 2, 1.0, 0.0),
    (1.0, 50, 1.0, 0.0),
    (1.0, VOCAB, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.5, 0, 0.5, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 0.999999, 0.0),
    (1.0, 0, 1.0, 0.05),
    (1.0, 0, 1.0, 1.0),
    (1.3, 40, 0.8, 0.02),
)


def _weights(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    scores = mx.array(logits)
    column = mx.ones(len(logits))
    shape = SamplingShape(draw=True, top_k=top_k > 0, top_p=top_p < 1)
    given = {"temperature": temperature * column, "min_p": min_p * column, "top_p": top_p * column}
    given["top_k"] = (top_k * column).astype(mx.int32)
    return np.array(kept_weights(shape, scores, mx.max(scores, -1, keepdims=True), given))


def _kept(weights: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Which of one row's tokens stay, by sorting, in float64."""
    falling = np.sort(weights.astype(np.float64))[::-1]
    if top_k:
        falling = falling[falling >= falling[min(top_k, VOCAB) - 1]]
    least = max(falling[-1], np.float32(min_p))
    if top_p < 1:
        reached = np.cumsum(falling) >= top_p * falling.sum()
        least = max(least, falling[np.argmax(reached)])
    return (weights >= least) & (weights > 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), FILTERS)
def test_filters_keep_what_sorting_in_float64_keeps(
    kind: str, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = _logits(kind)
    everything = _weights(logits, temperature, 0, 1.0, 0.0)
    filtered = _weights(logits, temperature, top_k, top_p, min_p)
    for row, kept in zip(everything, filtered, strict=True):
        # A float32 sum may fall on either side of a border that lies within its rounding.
        fewest = _kept(row, top_k, top_p * (1 - 2e-6), min_p)
        most = _kept(row, top_k, min(1.0, top_p * (1 + 2e-6)), min_p)
        assert np.all(fewest <= (kept > 0))
        assert np.all((kept > 0) <= most)
        assert np.array_equal(kept[kept > 0], row[kept > 0])
        assert kept.max() == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1e-5, 0.7, 1.0, 100.0])
def test_weights_are_the_softmax_up_to_a_factor(kind: str, temperature: float) -> None:
    logits = _logits(kind).astype(np.float64)
    exact = np.exp((logits - logits.max(-1, keepdims=True)) / np.float32(temperature))
    # The exponent itself is rounded to float32: its error grows with its size.
    np.testing.assert_allclose(_weights(logits, temperature, 0, 1.0, 0.0), exact, rtol=2e-5, atol=1e-37)


@pytest.mark.parametrize("kind", KINDS)
def test_draw_inverts_the_cumulative_distribution(kind: str) -> None:
    weights = _weights(_logits(kind), 1.0, 0, 1.0, 0.0)[0]
    uniforms = np.append(np.linspace(0, 1, 2000, endpoint=False), LAST_UNIFORM).astype(np.float32)
    drawn = np.array(inverse_cdf(mx.broadcast_to(mx.array(weights), (2001, VOCAB)), mx.array(uniforms)))
    borders = np.cumsum(weights.astype(np.float64)) / weights.astype(np.float64).sum()
    earliest = np.searchsorted(borders, uniforms - 1e-6, side="right")
    latest = np.searchsorted(borders, uniforms + 1e-6, side="right").clip(max=VOCAB - 1)
    assert np.all((earliest <= drawn) & (drawn <= latest))
    assert np.all(weights[drawn] > 0)


@pytest.mark.parametrize("uniform", [0.0, 0.5, LAST_UNIFORM])
@pytest.mark.parametrize("allowed", [(0,), (VOCAB - 1,), (255, 256), (3, 300, 599)])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1 / 3])
def test_draw_never_gives_a_token_of_no_weight(
    uniform: float, allowed: tuple[int, ...], scale: float
) -> None:
    weights = np.zeros((1, VOCAB), np.float32)
    weights[0, list(allowed)] = scale
    weights[0, allowed[0]] = 1
    token = inverse_cdf(mx.array(weights), mx.array([uniform])).item()
    assert token in allowed


def test_a_draw_reaches_small_weights_behind_a_large_one() -> None:
    weights = np.full((1, 100_000), 2e-8, np.float32)
    weights[0, 0] = 1
    drawn = [inverse_cdf(mx.array(weights), mx.array([u])).item() for u in (0.9985, 0.999)]
    assert drawn == pytest.approx([(0.9985 * 1.002 - 1) / 2e-8, (0.999 * 1.002 - 1) / 2e-8], abs=200)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_greedy_takes_the_lowest_of_equal_ids(dtype: mx.Dtype) -> None:
    logits = mx.array([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0], [-9.0, -np.inf, -8.0, -8.0]], dtype)
    tokens, ok = sample(SamplingShape(), logits, mx.zeros(3, mx.int32), [])
    assert tokens.tolist() == [1, 0, 2]
    assert all(ok.tolist())


@pytest.mark.parametrize("draw", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 300, VOCAB - 1])
def test_a_row_that_is_not_finite_is_flagged_and_spares_the_others(
    draw: bool, bad: float, place: int
) -> None:
    logits = _logits("normal")
    healthy = logits.copy()
    logits[1, place] = bad
    logits[2] = -np.inf
    shape = SamplingShape(draw=draw, top_p=draw)
    values = {"uniforms": 0.4, "temperature": 1.0, "min_p": 0.0, "top_p": 0.9}
    inputs = [mx.full((4,), values[name]) for name in shape.inputs]
    tokens, ok = sample(shape, mx.array(logits), mx.zeros(4, mx.int32), inputs)
    expected, _ = sample(shape, mx.array(healthy), mx.zeros(4, mx.int32), inputs)
    assert ok.tolist() == [True, False, False, True]
    assert tokens.tolist() == [expected[0].item(), 0, 0, expected[3].item()]


def test_logprobs_are_those_of_the_models_distribution() -> None:
    logits = _logits("peaked")
    shape = SamplingShape(logprobs=True)
    tokens, _, logprob, ids, top = sample(shape, mx.array(logits), mx.zeros(4, mx.int32), [])
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    rows = np.arange(4)
    np.testing.assert_allclose(np.array(logprob), exact[rows, np.array(tokens)], atol=1e-4)
    assert [set(row) for row in ids.tolist()] == [set(np.argsort(row)[-20:]) for row in exact]
    np.testing.assert_allclose(np.array(top), exact[rows[:, None], np.array(ids)], atol=1e-4)


def test_logprobs_of_a_vocabulary_below_twenty() -> None:
    outputs = sample(SamplingShape(logprobs=True), mx.zeros((2, 5)), mx.zeros(2, mx.int32), [])
    assert [sorted(row) for row in outputs[3].tolist()] == [[0, 1, 2, 3, 4]] * 2


def test_labels_name_the_parts() -> None:
    assert SamplingShape().label == "greedy"
    full = SamplingShape(draw=True, top_k=True, top_p=True, penalties=True, bias_width=8, logprobs=True)
    assert full.label == "draw+top_k+top_p+penalties+bias8+logprobs"
