"""The device that MLX computes on by default."""

import os
from functools import cache

import mlx.core as mx


@cache
def on_cpu() -> bool:
    return bool(mx.default_device() == mx.Device(mx.cpu))


def device_name() -> str:
    """ "cpu" or "gpu"."""
    return "cpu" if on_cpu() else "gpu"


def device_memory_bytes() -> int:
    """Memory the device may use in all; on the CPU and on CUDA, what is in use here and what is free."""
    if device_name() == "cpu":
        return mx.get_active_memory() + os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    info = mx.device_info()
    if mx.cuda.is_available():
        return mx.get_active_memory() + mx.get_cache_memory() + int(info["free_memory"])
    return int(info["memory_size"])


def compiles_kernels() -> bool:
    """Whether the first run of any shape may be far slower than the next: CUDA compiles what it meets."""
    return mx.cuda.is_available()


def plans_by_shape() -> bool:
    """Whether attention over several positions is planned anew for each shape, which takes far longer.

    CUDA's does, by cuDNN; what was planned is kept, see `keep_plans`.
    """
    return mx.cuda.is_available()


def keep_plans() -> None:
    """Before the first plan is made: have MLX keep more of them than its 64, which one long prompt takes."""
    os.environ.setdefault("MLX_CUDA_SDPA_CACHE_SIZE", "4096")
