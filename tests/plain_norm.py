"""Built-in operations in the place of the kernel that adds and norms, for machines without CUDA."""

import struct
from typing import Any

import mlx.core as mx
import pytest

from mlxd.batching import norm_kernel
from mlxd.batching.cuda_kernel import Launch


class PlainNorm:
    """Stands in for `norm_kernel.kernel`.

    Attributes:
        rows: of each launch.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self) -> Launch:
        return self.launch

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
        first, second, weight = inputs
        constants = dict(template)
        assert grid[0] == threadgroup[0] * (first.size // constants["DIM"])
        assert [first.dtype, weight.dtype] == [constants["T"], constants["W"]] == output_dtypes
        assert [first.shape, second.shape] == output_shapes
        self.rows.append(grid[0] // threadgroup[0])
        eps = struct.unpack("<f", struct.pack("<i", constants["EPS"]))[0]
        total = first + second
        return [total, mx.fast.rms_norm(total, weight, eps)]


def use_plain_norm(monkeypatch: pytest.MonkeyPatch) -> PlainNorm:
    """As if the machine had the kernel."""
    plain = PlainNorm()
    monkeypatch.setattr(norm_kernel, "kernel", plain)
    monkeypatch.setattr(norm_kernel, "is_available", lambda: True)
    return plain
