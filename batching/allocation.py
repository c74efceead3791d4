"""MLX's many words for a device that has no memory left, as one error."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from mlxd.batching.errors import OutOfMemoryError

_SIGNS = re.compile(
    r"^\[(?:malloc|malloc_async|metal::malloc)\] (?:Unable|Attempting) to allocate \d+ bytes"
    r"|^\[metal::malloc\] Resource limit \(\d+\) exceeded"
    r"|^\[METAL\] Command buffer execution failed: Insufficient Memory"
    r"|^cu\w+(?:\(.*\))? failed: out of memory"
    r"|^std::bad_alloc"
)
"""Sources: mlx/allocator.cpp; mlx/backend/metal/allocator.cpp and device.cpp; mlx/backend/cuda/allocator.cpp
and utils.cpp; mlx/scheduler.cpp, where a stream's own thread threw. On this thread std::bad_alloc is a
MemoryError. MLX's CPU allocator (0.32.4) says nothing: the process ends by a signal."""


def is_allocation_failure(error: BaseException) -> bool:
    """Whether MLX says that memory ran out, on the device or here."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _SIGNS.search(str(error)) is not None
    )


@contextmanager
def allocating() -> Iterator[None]:
    """Raises OutOfMemoryError for whatever MLX raises where memory runs out, once the device stands still.

    Until then, what was launched may still write to arrays that only the failed call holds.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_allocation_failure(error):
            raise
        _settle()
        raise OutOfMemoryError(str(error) or "no memory for a host object") from error


def _settle() -> None:
    try:
        mx.synchronize()
    except RuntimeError as error:  # kept by the stream since the step that failed
        if not is_allocation_failure(error):
            raise
