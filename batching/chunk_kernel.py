"""A prefill chunk into its pages by a CUDA kernel of our own: pools stay the arrays they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx

from mlxd.batching.attention_kernel import is_supported
from mlxd.batching.cuda_kernel import Launch, make_kernel
from mlxd.caches.paged_view import PrefillView

_THREADS = 1024
"""Of a block: few numbers for each, which waits for one before it asks for the next."""
_INPUTS = ("key", "value", "keys", "values", "pages")
_CHUNK = (
    "mlxd::Chunk<T, {dim}>{{{name}, {name}_strides[0], {name}_strides[1], {name}_strides[2], "
    "{name}_strides[3], {name}_shape[2]}}"
)
_BODY = f"""
  mlxd::write_chunk<PAGE>({_CHUNK.format(name="key", dim="KEY_DIM")},
                          {_CHUNK.format(name="value", dim="VALUE_DIM")},
                          const_cast<T*>(keys), const_cast<T*>(values), pages);
  if (blockIdx.x + blockIdx.y + blockIdx.z + threadIdx.x == 0) written[0] = 1;
"""


@dataclass(frozen=True, slots=True)
class ChunkCase:
    """What the kernel is compiled for."""

    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    page_size: int


class KernelWriter:
    """Writes chunks by the kernel, into pools that the decode kernel serves (paged_view.ChunkWriter).

    Attributes:
        cases: what the kernel was asked for so far.
    """

    def __init__(self) -> None:
        self.cases: set[ChunkCase] = set()

    def serves(self, keys: mx.array, values: mx.array) -> bool:
        return is_supported(keys.shape[-1], values.shape[-1], keys.dtype, keys.shape[-2])

    def write(self, view: PrefillView, pools: Sequence[mx.array], new: Sequence[mx.array]) -> mx.array:
        keys, values = pools
        _, heads, size, key_dim = keys.shape
        case = ChunkCase(key_dim, values.shape[-1], keys.dtype, size)
        self.cases.add(case)
        given = [x.astype(pool.dtype) for x, pool in zip(new, pools, strict=True)]
        (written,) = kernel()(
            inputs=[*given, keys, values, view.pages],
            template=[
                ("T", case.dtype),
                ("KEY_DIM", case.key_dim),
                ("VALUE_DIM", case.value_dim),
                ("PAGE", case.page_size),
            ],
            grid=(heads * _THREADS, view.num_pages, new[0].shape[0]),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.float32],
        )
        return written


@cache
def kernel() -> Launch:
    source = Path(__file__).with_name("chunk_kernel.cu").read_text()
    return make_kernel("chunk", _INPUTS, ("written",), source, _BODY)
