"""[M] Pages out of the caches' arrays and back into them, as bytes, and from one place to another."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxd.caches.contract import PageStorage
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
    """One group's storages as the arrays that a page of it is a part of: [num_pages + 1, ...] each.

    A page's payload is its part of every array, in their order.
    """

    storages: Sequence[PageStorage]

    @property
    def planes(self) -> tuple[PlaneSpec, ...]:
        return tuple(
            PlaneSpec(f"layers.{layer}.{index}", _DTYPES[array.dtype], tuple(array.shape[1:]))
            for layer, storage in enumerate(self.storages)
            for index, array in enumerate(storage.state())
        )

    def read(self, pages: Sequence[int]) -> list[bytes]:
        """Payloads of these pages; waits for the steps that were launched."""
        index = mx.array(list(pages), dtype=mx.int32)
        parts = [array[index].reshape(len(pages), -1).view(mx.uint8) for array in self._arrays]
        mx.eval(*parts)
        raw = [np.array(part, copy=False) for part in parts]
        return [b"".join(part[i].tobytes() for part in raw) for i in range(len(pages))]

    def write(self, pages: Sequence[int], payloads: Sequence[bytes | memoryview]) -> None:
        """Overwrite these pages whole; lazily, before whatever is computed next."""
        index = mx.array(list(pages), dtype=mx.int32)
        split = [split_payload(self.planes, payload) for payload in payloads]
        for array, parts in zip(self._arrays, zip(*split, strict=True), strict=True):
            raw = np.stack([np.frombuffer(part, np.uint8) for part in parts])
            array[index] = mx.array(raw).view(array.dtype).reshape(len(pages), *array.shape[1:])

    def copy(self, origins: Sequence[int], pages: Sequence[int]) -> None:
        """Overwrite these pages with others, all of which are read first; waits for launched steps.

        Not to wait would be to copy the whole arrays: they are written in place only where nobody reads them.
        """
        source, target = (mx.array(list(ids), dtype=mx.int32) for ids in (origins, pages))
        found = [array[source] for array in self._arrays]
        mx.eval(*found)
        for array, pages_of_array in zip(self._arrays, found, strict=True):
            array[target] = pages_of_array

    @property
    def _arrays(self) -> list[mx.array]:
        return [array for storage in self.storages for array in storage.state()]
