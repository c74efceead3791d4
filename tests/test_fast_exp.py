"""The exp of softmax and SwiGLU on MLX's CPU build, against float64."""

import mlx.core as mx
import numpy as np
import pytest

from mlxd.batching.fast_exp import exp_of_difference, fast_swiglu


@pytest.mark.parametrize("lowest", [-1.0, -16.0, -87.0])
def test_exp_is_as_near_as_it_says(lowest: float) -> None:
    x = np.linspace(lowest, 0.0, 100_001, dtype=np.float32)
    found = np.array(exp_of_difference(mx.array(x), mx.array([0.0])), np.float64)
    assert np.abs(found / np.exp(x.astype(np.float64)) - 1).max() < 1e-6


def test_the_highest_score_weighs_one_and_barred_ones_nothing() -> None:
    found = exp_of_difference(mx.array([3.25, 3.25 - 88, -1e9, -3e38]), mx.array([3.25]))
    assert found[0].item() == 1.0
    assert 0 <= found[1:].min().item() <= found[1:].max().item() < 1e-37


@pytest.mark.parametrize("gate", [0.0, 1e-3, -1.0, 5.0, -17.5, 80.0, -80.0, 1e4])
def test_swiglu_is_that_of_float64(gate: float) -> None:
    found = fast_swiglu(mx.array([gate, gate]), mx.array([1.5, -2.0]))
    expected = np.array([1.5, -2.0]) * gate / (1 + np.exp(-np.float64(gate)))
    np.testing.assert_allclose(np.array(found), expected, rtol=1e-6, atol=1e-37)


def test_swiglu_of_a_gate_below_all_exponents_is_next_to_nothing() -> None:
    assert abs(fast_swiglu(mx.array([-100.0]), mx.array([1.0])).item()) < 1e-35
