"""The least that a decode step can take: what it must read, at the rate at which MLX reads."""

import time
from collections.abc import Callable, Sequence
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxd.caches.kinds import Layer, group_specs

_ON_GPU_BYTES, _ON_CPU_BYTES = 2**32, 2**28
_COLUMNS = 4096
_REPEATS = 9
_MODEL_PAGE = 64


def on_cpu() -> bool:
    return mx.default_device() == mx.Device(mx.cpu)


def read_rate() -> float:
    """Bytes a second that MLX reads of one large matrix, at best: by a sum or by a product with one row."""
    size = (_ON_CPU_BYTES if on_cpu() else _ON_GPU_BYTES) // 4
    rate = _matrix_rate(mx.ones((size // _COLUMNS, _COLUMNS), mx.float32))
    mx.clear_cache()
    return rate


def _matrix_rate(matrix: mx.array) -> float:
    row = mx.ones((1, _COLUMNS), mx.float32)
    mx.eval(matrix, row)
    reads: tuple[Callable[[], mx.array], ...] = lambda: matrix.sum(), lambda: row @ matrix.T
    times = []
    for read in reads:
        for _ in range(_REPEATS):
            begun = time.perf_counter()
            mx.eval(read())
            times.append(time.perf_counter() - begun)
    return matrix.nbytes / min(times)


def weights_bytes(model: nn.Module) -> int:
    """Of the parameters that a step reads whole: an embedding that is not the head, too, gives a few rows."""
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    has_head = any(name.startswith("lm_head.") for name, _ in parameters)
    return sum(array.nbytes for name, array in parameters if not (has_head and "embed_tokens." in name))


def live_bytes(layers: Sequence[Layer], lengths: Sequence[float]) -> float:
    """Keys and values that rows of these lengths attend to; those outside a window are not read."""
    return sum(
        spec.state_bytes or spec.bytes_per_token * min(length, spec.window or length)
        for spec in group_specs(layers, _MODEL_PAGE)
        for length in lengths
    )
