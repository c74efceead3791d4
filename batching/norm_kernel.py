"""The sum of two arrays and its RMS norm by one CUDA kernel of our own, where MLX takes two."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxd.batching.cuda_kernel import Launch, bits_of, make_kernel

_DTYPES = (mx.bfloat16, mx.float16, mx.float32)
_WIDEST, _WIDEST_UNEVEN = 16384, 8192
"""Numbers of a row that goes in whole loads of 16 bytes, and of one that goes number by number."""
_LANES = 32
_MOST_THREADS = 512
"""Of a block: what each keeps of the widest row then fits into its registers."""
_LOAD_BYTES = 16


@dataclass(frozen=True, slots=True)
class NormCase:
    """What the kernel is compiled for.

    Attributes:
        dims: numbers of a row.
        dtype: of what is added, and of the sum.
        weight_dtype: of the weight, and of what was normed.
        eps: added to the mean of squares.
    """

    dims: int
    dtype: mx.Dtype
    weight_dtype: mx.Dtype
    eps: float

    @property
    def is_supported(self) -> bool:
        has_dtypes = self.dtype in _DTYPES and self.weight_dtype in (self.dtype, mx.float32)
        return has_dtypes and 0 < self.dims <= (_WIDEST if self._is_even else _WIDEST_UNEVEN)

    @property
    def threads(self) -> int:
        """Of a block: as many as have something to do, in whole warps."""
        loads = self.dims * self.dtype.size // _LOAD_BYTES if self._is_even else self.dims
        return min(_MOST_THREADS, -(-loads // _LANES) * _LANES)

    @property
    def _is_even(self) -> bool:
        return self.dims * self.dtype.size % _LOAD_BYTES == 0

    @property
    def constants(self) -> list[tuple[str, Any]]:
        return [
            ("T", self.dtype),
            ("W", self.weight_dtype),
            ("DIM", self.dims),
            ("THREADS", self.threads),
            ("EPS", bits_of(self.eps)),
        ]


def is_available() -> bool:
    return bool(mx.cuda.is_available())


def add_and_norm(
    case: NormCase, first: mx.array, second: mx.array, weight: mx.array
) -> tuple[mx.array, mx.array]:
    """A sum, rounded to its dtype, and its RMS norm along the last axis.

    Args:
        first, second: [..., dims], at least one row, at any strides.
        weight: [dims].
    Returns:
        The sum in the dtype of what was added, and what was normed in the weight's; [..., dims] each.
    """
    threads, rows = case.threads, first.size // case.dims
    total, normed = kernel()(
        inputs=[first, second, weight],
        template=case.constants,
        grid=(rows * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[first.shape, first.shape],
        output_dtypes=[case.dtype, case.weight_dtype],
    )
    return total, normed


_BODY = """
  mlxd::add_and_norm<DIM, THREADS>(
      mlxd::Row<T>{first + mlxd::row_begin(blockIdx.x, first_shape, first_strides, first_ndim),
                   first_strides[first_ndim - 1]},
      mlxd::Row<T>{second + mlxd::row_begin(blockIdx.x, second_shape, second_strides, second_ndim),
                   second_strides[second_ndim - 1]},
      mlxd::Row<W>{weight, weight_strides[0]}, __int_as_float(EPS), total, normed);
"""


@cache
def kernel() -> Launch:
    functions = Path(__file__).with_name("norm_kernel.cu").read_text()
    return make_kernel("norm", ("first", "second", "weight"), ("total", "normed"), functions, _BODY)
