"""The host side of the kernel that adds and norms: when it serves, how it is launched, how it is checked.

The kernel itself runs on a machine with CUDA; here built-in operations compute what it would.
"""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from plain_norm import PlainNorm, use_plain_norm

from mlxd.batching import norm_check, norm_kernel
from mlxd.batching.norm_kernel import NormCase, add_and_norm


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> PlainNorm:
    return use_plain_norm(monkeypatch)


@pytest.mark.parametrize(
    ("dims", "dtype", "weight_dtype", "served"),
    [
        (4096, mx.bfloat16, mx.bfloat16, True),
        (4096, mx.float16, mx.float32, True),
        (16384, mx.float32, mx.float32, True),
        (8191, mx.bfloat16, mx.bfloat16, True),
        (1, mx.float16, mx.float16, True),
        (16385, mx.bfloat16, mx.bfloat16, False),
        (8193, mx.bfloat16, mx.bfloat16, False),
        (16392, mx.float32, mx.float32, False),
        (0, mx.bfloat16, mx.bfloat16, False),
        (4096, mx.bfloat16, mx.float16, False),
        (4096, mx.float32, mx.bfloat16, False),
        (4096, mx.int32, mx.int32, False),
    ],
)
def test_rows_that_fit_into_a_block_are_served_with_weights_like_them_or_in_float32(
    dims: int, dtype: mx.Dtype, weight_dtype: mx.Dtype, served: bool
) -> None:
    assert NormCase(dims, dtype, weight_dtype, 1e-5).is_supported == served


@pytest.mark.parametrize(
    ("dims", "dtype", "threads"),
    [
        (64, mx.bfloat16, 32),
        (768, mx.bfloat16, 96),
        (2048, mx.bfloat16, 256),
        (2048, mx.float32, 512),
        (4096, mx.bfloat16, 512),
        (16384, mx.float32, 512),
        (100, mx.bfloat16, 128),
        (1001, mx.float32, 512),
    ],
)
def test_a_block_has_a_thread_for_each_load_in_whole_warps(dims: int, dtype: mx.Dtype, threads: int) -> None:
    assert NormCase(dims, dtype, dtype, 1e-5).threads == threads


def test_each_row_gets_a_block(plain: PlainNorm) -> None:
    case = NormCase(48, mx.bfloat16, mx.float32, 1e-6)
    first, second = mx.random.normal((2, 3, 5, 48)).astype(mx.bfloat16)
    weight = mx.random.normal((48,))
    total, normed = add_and_norm(case, first, second, weight)
    assert plain.rows == [15]
    assert (total.dtype, normed.dtype) == (mx.bfloat16, mx.float32)
    assert mx.array_equal(total, first + second)
    assert mx.array_equal(normed, mx.fast.rms_norm(first + second, weight, 1e-6))


CASES = (
    NormCase(64, mx.bfloat16, mx.bfloat16, 1e-5),
    NormCase(33, mx.float16, mx.float32, 1e-6),
    NormCase(128, mx.float32, mx.float32, 1e-5),
)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_right_kernel_passes(case: NormCase) -> None:
    assert norm_check.fault_in([case]) is None


def unweighted(total: mx.array, normed: mx.array) -> list[mx.array]:
    return [total, mx.fast.rms_norm(total, None, 1e-5)]


def half_a_sum(total: mx.array, normed: mx.array) -> list[mx.array]:
    return [total / 2, normed]


def without_the_last_number(total: mx.array, normed: mx.array) -> list[mx.array]:
    return [total, mx.concatenate([normed[..., :-1], mx.full((*normed.shape[:-1], 1), math.nan)], axis=-1)]


def as_if_rows_were_one(total: mx.array, normed: mx.array) -> list[mx.array]:
    return [total, mx.broadcast_to(normed[:1], normed.shape)]


def out_of_registers(total: mx.array, normed: mx.array) -> list[mx.array]:
    raise RuntimeError("too many resources requested for launch")


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (unweighted, "the norm of 1 rows is off by"),
        (half_a_sum, "the sum of 1 rows is off by 0.5"),
        (without_the_last_number, "the norm of 1 rows is off by nan"),
        (as_if_rows_were_one, "the norm of 3 rows is off by"),
        (out_of_registers, "RuntimeError: too many resources"),
    ],
)
def test_a_wrong_kernel_is_found_out(
    monkeypatch: pytest.MonkeyPatch, plain: PlainNorm, wrong: Callable[..., list[mx.array]], fault: str
) -> None:
    def launch(**arguments: Any) -> list[mx.array]:
        return wrong(*plain.launch(**arguments))

    monkeypatch.setattr(norm_kernel, "kernel", lambda: launch)
    found = norm_check.fault_in(CASES)
    assert found is not None
    assert found.startswith(fault)
    assert "NormCase(dims=64" in found
