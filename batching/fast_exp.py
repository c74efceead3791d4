"""exp on MLX's CPU build, where its own takes 9 ns a number and was a tenth of a decode step."""

from functools import cache

import mlx.core as mx

_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693359375  # exact in float32, so n * _LN2_HIGH rounds nothing for the n that occur
_LN2_LOW = -2.12194440e-4
_LOWEST = -87.0
"""Below it exp is under the smallest normal float32: nothing beside a weight that counts."""
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
    return _fast(scores, top) if _on_cpu() else mx.exp(scores - top)


@cache
def _on_cpu() -> bool:
    return bool(mx.default_device() == mx.Device(mx.cpu))


@mx.compile
def _fast(scores: mx.array, top: mx.array) -> mx.array:
    """Relative error 1e-6: x = n ln 2 + r, a polynomial in r, and n put into the exponent's bits.

    As one compiled loop it is vectorised: 2 ns a number, the difference included. The polynomial is that of
    expf in Cephes.
    """
    x = mx.maximum(scores - top, _LOWEST)
    n = mx.floor(x * _LOG2_E + 0.5)
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = mx.zeros_like(r) + _POLYNOMIAL[0]
    for coefficient in _POLYNOMIAL[1:]:
        p = p * r + coefficient
    power = ((n.astype(mx.int32) + 127) << 23).view(mx.float32)
    return (p * r * r + r + 1.0) * power
