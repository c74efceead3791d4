"""exp on MLX's CPU build, where its own takes 9 ns a number and was a fifth of a decode step."""

import mlx.core as mx

from mlxd.batching.device import on_cpu

_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693359375  # exact in float32, so n * _LN2_HIGH rounds nothing for the n that occur
_LN2_LOW = -2.12194440e-4
_LOWEST = -87.0
"""Below it exp is under the smallest normal float32: nothing beside a number that counts."""
_SHIFT = 12582912.0
"""1.5 x 2^23: what is added to it is rounded to an integer, which then are its low bits."""
_ONE = 127 - 0x4B400000
"""Makes of those bits the exponent's, of 2^n."""
_POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


def exp_of_difference(scores: mx.array, top: mx.array) -> mx.array:
    """exp(scores - top), for scores not above top; float32, `top` broadcasts."""
    return _fast_difference(scores, top) if on_cpu() else mx.exp(scores - top)


@mx.compile
def _fast_difference(scores: mx.array, top: mx.array) -> mx.array:
    return _exp(scores - top)


@mx.compile
def fast_swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """gate * sigmoid(gate) * x, float32 of one shape."""
    return gate * x / (1.0 + _exp(mx.minimum(-gate, -_LOWEST)))


def _exp(x: mx.array) -> mx.array:
    """Of float32 not above -_LOWEST, relative error 1e-6; to be compiled.

    x = n ln 2 + r, a polynomial in r, and n put into the exponent's bits. As one compiled loop it is
    vectorised: 1 ns a number. The polynomial is that of expf in Cephes.
    """
    x = mx.maximum(x, _LOWEST)
    shifted = x * _LOG2_E + _SHIFT
    n = shifted - _SHIFT
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = mx.zeros_like(r) + _POLYNOMIAL[0]
    for coefficient in _POLYNOMIAL[1:]:
        p = p * r + coefficient
    power = ((shifted.view(mx.int32) + _ONE) << 23).view(mx.float32)
    return (p * r * r + r + 1.0) * power
