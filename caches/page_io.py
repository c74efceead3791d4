"""[M] Pages out of the caches' arrays and back into them, as bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxd.caches.contract import RowCache
from mlxd.caches.persistence import PlaneSpec, split_payload

_DTYPES = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.float32: "F32",
    mx.uint64: "U64",
    mx.int64: "I64",
}


@dataclass(frozen=True, slots=True)
class PageArrays:
    """A model's caches as the arrays that one page is a part of: [num_pages + 1, ...] each.

    A page here is a tuple of page ids, one a group; its payload is its part of every array, in their order.

    Attributes:
        groups: each cache's group.
    """

    caches: Sequence[RowCache]
    groups: Sequence[int]

    @property
    def planes(self) -> tuple[PlaneSpec, ...]:
        return tuple(
            PlaneSpec(f"layers.{layer}.{index}", _DTYPES[array.dtype], tuple(array.shape[1:]))
            for layer, cache in enumerate(self.caches)
            for index, array in enumerate(cache.state())
        )

    def read(self, pages: Sequence[tuple[int, ...]]) -> list[bytes]:
        """Payloads of these pages; waits for the steps that were launched."""
        parts = [array[index].reshape(len(pages), -1).view(mx.uint8) for array, index in self._indexed(pages)]
        mx.eval(*parts)
        raw = [np.array(part, copy=False) for part in parts]
        return [b"".join(part[i].tobytes() for part in raw) for i in range(len(pages))]

    def write(self, pages: Sequence[tuple[int, ...]], payloads: Sequence[bytes | memoryview]) -> None:
        """Overwrite these pages whole; lazily, before whatever is computed next."""
        split = [split_payload(self.planes, payload) for payload in payloads]
        for (array, index), parts in zip(self._indexed(pages), zip(*split, strict=True), strict=True):
            raw = np.stack([np.frombuffer(part, np.uint8) for part in parts])
            array[index] = mx.array(raw).view(array.dtype).reshape(len(pages), *array.shape[1:])

    def _indexed(self, pages: Sequence[tuple[int, ...]]) -> list[tuple[mx.array, mx.array]]:
        """Every array, and the ids of these pages in it, int32 [n]."""
        index = [mx.array(ids, dtype=mx.int32) for ids in zip(*pages, strict=True)]
        return [
            (array, index[group])
            for cache, group in zip(self.caches, self.groups, strict=True)
            for array in cache.state()
        ]
