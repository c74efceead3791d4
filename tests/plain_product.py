"""Built-in operations in the place of the kernel that multiplies few rows, for machines without CUDA."""

from math import prod
from typing import Any

import mlx.core as mx
import pytest

from mlxd.batching import product_kernel
from mlxd.batching.cuda_kernel import Launch


class PlainProduct:
    """Stands in for `product_kernel.kernel`.

    Attributes:
        rows: of each launch.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, *, with_bias: bool) -> Launch:
        def launch(**arguments: Any) -> list[mx.array]:
            assert len(arguments["inputs"]) == 2 + with_bias
            return self.launch(**arguments)

        return launch

    def launch(
        self,
        *,
        inputs: list[mx.array],
        template: list[tuple[str, Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
    ) -> list[mx.array]:
        x, weight, *bias = inputs
        constants, rows = dict(template), prod(x.shape[:-1])
        outputs, inner = weight.shape
        assert threadgroup[0] == 32 * constants["WARPS"]
        assert grid[0] // threadgroup[0] * 16 * constants["TILES"] >= outputs
        assert 8 * constants["COLUMNS"] >= rows
        assert inner % (32 * constants["SPAN"]) == outputs % 16 == 0
        assert {array.dtype for array in inputs} == {constants["T"]} == set(output_dtypes)
        assert output_shapes == [(*x.shape[:-1], outputs)]
        self.rows.append(rows)
        product = x @ weight.T
        return [product + bias[0] if bias else product]


def use_plain_product(monkeypatch: pytest.MonkeyPatch) -> PlainProduct:
    """As if the machine had the kernel, and that served float32."""
    plain = PlainProduct()
    monkeypatch.setattr(product_kernel, "kernel", plain)
    monkeypatch.setattr(product_kernel, "is_available", lambda: True)
    monkeypatch.setattr(product_kernel, "DTYPES", (mx.bfloat16, mx.float16, mx.float32))
    return plain
