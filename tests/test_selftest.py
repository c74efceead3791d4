"""How far the self-test lets two right ways to compute differ."""

from typing import Literal

import mlx.core as mx
import pytest

from mlxd.batching.selftest import tolerance
from mlxd.caches.quantization import Quantization


@pytest.mark.parametrize(
    ("dtype", "device", "limit"),
    [
        (mx.float32, mx.cpu, 2e-3),
        (mx.float32, mx.gpu, 0.05),
        (mx.float16, mx.cpu, 0.35),
        (mx.bfloat16, mx.cpu, 0.35),
        (mx.float16, mx.gpu, 0.35),
        (mx.bfloat16, mx.gpu, 0.35),
    ],
)
def test_rounding_is_told_from_error_by_what_the_device_rounds(
    dtype: mx.Dtype, device: mx.DeviceType, limit: float
) -> None:
    assert tolerance(dtype, device) == limit


@pytest.mark.parametrize(("bits", "limit"), [(8, 0.35), (4, 2.5)])
def test_codes_are_coarser_than_any_device_rounds(bits: Literal[4, 8], limit: float) -> None:
    for dtype in (mx.float32, mx.bfloat16):
        assert tolerance(dtype, mx.cpu, Quantization(bits=bits)) == limit
