"""Making CUDA kernels of our own through MLX."""

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import cast

import mlx.core as mx

Launch = Callable[..., list[mx.array]]


def make_kernel(
    role: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    functions: str,
    body: str,
    *,
    reads_strides: bool = True,
) -> Launch:
    """A kernel of these names' arrays.

    MLX keeps what it compiled by name alone, also on disk, so the name holds a digest of the source.

    Args:
        functions, body: CUDA C++, what the kernel calls and what it does.
        reads_strides: whether it reads arrays as they lie; else MLX copies those that do not lie together.
    """
    digest = hashlib.blake2b((functions + body).encode(), digest_size=8).hexdigest()
    made = mx.fast.cuda_kernel(
        name=f"mlxd_{role}_{digest}",
        input_names=inputs,
        output_names=outputs,
        header=functions,
        source=body,
        ensure_row_contiguous=not reads_strides,
    )
    return cast(Launch, made)


def bits_of(number: float) -> int:
    """As a kernel's constant, of which MLX takes integers and dtypes: `__int_as_float` there."""
    bits: int = struct.unpack("<i", struct.pack("<f", number))[0]
    return bits
