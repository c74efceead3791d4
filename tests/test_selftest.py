"""How far the self-test lets two right ways to compute differ."""

import mlx.core as mx
import pytest

from mlxd.batching.selftest import tolerance


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
