"""The host side of the kernel that multiplies few rows: when it serves, how it is launched.

The kernel itself runs on a machine with CUDA; here built-in operations compute what it would.
"""

import mlx.core as mx
import pytest
from plain_product import use_plain_product

from mlxd.batching.product_kernel import MOST_ROWS, ProductCase, multiply


@pytest.mark.parametrize(
    ("outputs", "inner", "dtype", "served"),
    [
        (32, 64, mx.bfloat16, True),
        (16, 64, mx.bfloat16, False),
        (128256, 4096, mx.float16, True),
        (2048, 2048, mx.float32, False),
        (2048, 2048, mx.uint32, False),
        (8, 64, mx.bfloat16, False),
        (2056, 2048, mx.bfloat16, False),
        (2048, 2080, mx.bfloat16, False),
        (2048, 32, mx.bfloat16, False),
        (0, 64, mx.bfloat16, False),
        (32, 0, mx.bfloat16, False),
    ],
)
def test_layers_of_whole_tiles_and_of_two_bytes_a_number_are_served(
    outputs: int, inner: int, dtype: mx.Dtype, served: bool
) -> None:
    assert ProductCase(outputs, inner, dtype).is_supported == served


@pytest.mark.parametrize("outputs", [32, 2048, 4112, 16384, 128256])
@pytest.mark.parametrize("inner", [64, 576, 2048, 14336])
def test_sums_are_in_one_order_for_any_number_of_rows(outputs: int, inner: int) -> None:
    case = ProductCase(outputs, inner, mx.bfloat16)
    forms = [case.form(rows) for rows in range(1, MOST_ROWS + 1)]
    assert len({(form.warps, form.span) for form in forms}) == 1
    for rows, form in enumerate(forms, 1):
        assert rows <= 8 * form.eights < 2 * max(rows, 8)
        assert inner % (32 * form.span) == 0


@pytest.mark.parametrize(
    ("outputs", "inner", "rows", "tiles"),
    [
        (2048, 2048, 32, 1),
        (3072, 2048, 16, 1),
        (3072, 2048, 17, 2),
        (4096, 4096, 8, 1),
        (4096, 4096, 9, 2),
        (6144, 4096, 32, 1),
        (16384, 2048, 16, 1),
        (16384, 2048, 17, 2),
    ],
)
def test_where_there_is_much_of_the_rows_they_are_read_half_as_often(
    outputs: int, inner: int, rows: int, tiles: int
) -> None:
    assert ProductCase(outputs, inner, mx.bfloat16).form(rows).tiles == tiles


@pytest.mark.parametrize("shape", [(2, 1), (1, 1), (32, 1), (5,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_of_any_axes_are_multiplied_at_once(
    shape: tuple[int, ...], has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = use_plain_product(monkeypatch)
    case = ProductCase(48, 64, mx.float16, has_bias)
    x, weight = (
        mx.random.normal((*shape, 64)).astype(mx.float16),
        mx.random.normal((48, 64)).astype(mx.float16),
    )
    bias = mx.ones((48,), mx.float16) if has_bias else None
    expected = x @ weight.T + (1.0 if has_bias else 0.0)
    assert mx.allclose(multiply(case, x, weight, bias), expected, atol=1e-2)
    assert plain.rows == [x.size // 64]
