"""What a layer whose keys and values are packed late is made of, and what a model sees of it in a step."""

from dataclasses import dataclass

import mlx.core as mx

from mlxd.caches.paged import LayerShape, PagedStandIn
from mlxd.caches.quantized import QuantizedShape, QuantizedStandIn


@dataclass(frozen=True, slots=True)
class DelayedShape(QuantizedShape):
    """A layer that is packed late; what it says of planes and bytes is that of the packed form."""

    @property
    def dense(self) -> LayerShape:
        return LayerShape(self.index, self.n_kv_heads, self.key_dim, self.value_dim, self.dtype)


class DelayedStandIn:
    """A layer inside a step of rows of both sorts: each row writes its own sort's pages, others scratch.

    The model gets NaN: only the attention seam may read, and it takes the numbers from `dense` and `packed`.
    """

    def __init__(self, dense: PagedStandIn, packed: QuantizedStandIn) -> None:
        self.dense = dense
        self.packed = packed
        self.offset = dense.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Takes [B, n_kv_heads, 1, head_dim] of the new position."""
        self.dense.update_and_fetch(keys, values)
        return self.packed.update_and_fetch(keys, values)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """For layers that attend to this one's keys and values; after its own update."""
        return self.packed.keys_and_values()

    def make_mask(self, num_tokens: int, window_size: int | None = None, return_array: bool = False) -> None:
        return None

    def choose(self, dense: mx.array, packed: mx.array) -> mx.array:
        """Each row's own of two [B, ...]."""
        is_packed = self.offset >= self.packed.view.spec.since
        return mx.where(is_packed.reshape(-1, *(1 for _ in dense.shape[1:])), packed, dense)

    @property
    def outputs(self) -> list[mx.array]:
        return [*self.dense.outputs, *self.packed.outputs]
