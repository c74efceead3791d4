"""Where figures were taken: the device, versions and limits that a line of theirs names."""

from importlib.metadata import version

import mlx.core as mx
from figures import Line
from floor import on_cpu, read_rate

from mlxd.batching.blas import BlasInfo


def describe(blas: BlasInfo, rate: float | None = None) -> Line:
    """`rate`: bytes a second that MLX reads; measured where it is not known yet."""
    device = "cpu" if on_cpu() else str(mx.device_info().get("device_name", "gpu"))
    return {
        "kind": "machine",
        "device": device,
        "blas": blas.name,
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "read_gb_per_s": round((rate or read_rate()) / 1e9, 1),
    }
