"""The device that MLX computes on by default."""

import os
from contextlib import suppress
from functools import cache
from importlib.metadata import version

import mlx.core as mx

from mlxd.batching.errors import ModelError
from mlxd.batching.user_cache import user_cache_folder


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

    CUDA's does, by cuDNN; what was planned is kept, see `keep_compiled`.
    """
    return mx.cuda.is_available()


def unpacks_by_batch() -> bool:
    """Whether a product with packed weights reads them anew for each of a batch's first axes."""
    return mx.cuda.is_available()


def keep_compiled() -> None:
    """On CUDA, before anything runs: have MLX keep what it compiles for later starts, and all of its plans.

    Its own places are a temporary folder, and 64 plans, which one long prompt takes. Changes the environment
    where that says nothing of it. Without a folder for caches that can be written, kernels go to MLX's own.
    """
    if not mx.cuda.is_available():
        return
    os.environ.setdefault("MLX_CUDA_SDPA_CACHE_SIZE", "4096")
    with suppress(ModelError, OSError):
        folder = user_cache_folder() / "ptx" / version("mlx")
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ.setdefault("MLX_PTX_CACHE_DIR", str(folder))
