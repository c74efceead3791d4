"""Products of a layer's weight with a few rows by a CUDA kernel of our own, at the rate of reading it.

MLX multiplies 2 rows and more by cuBLASLt, which costs the host several times what a kernel's launch does.
"""

from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxd.batching.cuda_kernel import Launch, make_kernel

FEWEST_ROWS, MOST_ROWS = 2, 32
_FILES = ("warp_products.cu", "product_kernel.cu")
DTYPES = (mx.bfloat16, mx.float16)
_TILE = 16
"""Outputs of one product of a warp."""
_STEP = 32
"""Inner numbers that a warp reads at once."""
_SHORT_SPAN, _LONG_SPAN = 2, 4
_FEW_OUTPUTS = 4096
"""Up to so many the inner dimension is divided among more warps, so that enough of them read."""
_MANY_NUMBERS = 2**24
"""Of such a weight, for 8 rows: with more, blocks of two tiles read x half as often. By time on an H200."""
_LANES = 32
_EIGHTS = (1, 2, 4)
"""Of rows: for how many the kernel is compiled."""


@dataclass(frozen=True, slots=True)
class ProductCase:
    """A layer.

    Attributes:
        outputs, inner: of the weight, [outputs, inner].
        dtype: of all arrays; sums are float32.
        has_bias: whether the layer adds one.
    """

    outputs: int
    inner: int
    dtype: mx.Dtype
    has_bias: bool = False

    @property
    def is_supported(self) -> bool:
        fits = self.outputs % _TILE == 0 and self.inner % (_SHORT_SPAN * _STEP) == 0
        return fits and self.outputs >= 2 * _TILE and self.inner > 0 and self.dtype in DTYPES

    def form(self, rows: int) -> "Form":
        """How so many rows are multiplied; `warps` and `span` are the same for any."""
        eights = next(eights for eights in _EIGHTS if 8 * eights >= rows)
        if self.outputs <= _FEW_OUTPUTS:
            warps, span = 16, _SHORT_SPAN
            reads_much_of_x = eights * self.outputs * self.inner > _MANY_NUMBERS
        else:
            warps, span = 4, _SHORT_SPAN if self.inner % (_LONG_SPAN * _STEP) else _LONG_SPAN
            reads_much_of_x = eights == _EIGHTS[-1] and self.outputs > 2 * _FEW_OUTPUTS
        if reads_much_of_x:
            return Form(tiles=2, eights=eights, warps=warps, span=span, ahead=_SHORT_SPAN)
        return Form(tiles=1, eights=eights, warps=warps, span=span, ahead=span)


@dataclass(frozen=True, slots=True)
class Form:
    """How the kernel divides its work.

    Attributes:
        tiles: of 16 outputs, that a warp takes at once.
        eights: of rows.
        warps: of a block, among which the inner dimension is divided.
        span: steps of 32 inner numbers that a warp takes before the next warp's.
        ahead: steps whose numbers are on their way at once.
    """

    tiles: int
    eights: int
    warps: int
    span: int
    ahead: int

    @property
    def constants(self) -> list[tuple[str, Any]]:
        return [
            ("TILES", self.tiles),
            ("COLUMNS", self.eights),
            ("WARPS", self.warps),
            ("SPAN", self.span),
            ("AHEAD", self.ahead),
        ]


def is_available() -> bool:
    return bool(mx.cuda.is_available())


def multiply(case: ProductCase, x: mx.array, weight: mx.array, bias: mx.array | None = None) -> mx.array:
    """`x @ weight.T + bias`, summed in float32 in an order that is the same for any number of rows.

    Args:
        x: [..., inner], of 1 to `MOST_ROWS` rows in all.
        weight, bias: [outputs, inner] and [outputs].
    Returns:
        [..., outputs] in the dtype of all.
    """
    form = case.form(prod(x.shape[:-1]))
    threads = _LANES * form.warps
    (y,) = kernel(with_bias=bias is not None)(
        inputs=[x, weight] if bias is None else [x, weight, bias],
        template=[("T", case.dtype), *form.constants],
        grid=(-(-case.outputs // (_TILE * form.tiles)) * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(*x.shape[:-1], case.outputs)],
        output_dtypes=[case.dtype],
    )
    return y


_BODY = """
  const mlxd::Product<T> product{{x, weight, {bias}, y, mlxd::count_rows(x_shape, x_ndim - 1),
                                 weight_shape[0], weight_shape[1]}};
  mlxd::multiply<T, TILES, COLUMNS, WARPS, SPAN, AHEAD>(product);
"""


@cache
def kernel(*, with_bias: bool) -> Launch:
    functions = "".join(Path(__file__).with_name(name).read_text() for name in _FILES)
    bias, inputs = ("bias", ("x", "weight", "bias")) if with_bias else ("nullptr", ("x", "weight"))
    body = _BODY.format(bias=bias)
    return make_kernel("product", inputs, ("y",), functions, body, reads_strides=False)
