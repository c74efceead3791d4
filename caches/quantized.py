"""Keys and values in pages of packed numbers: affine quantisation, 4 or 8 bits."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxd.caches.contract import DecodeSlot, DecodeStepInputs, KvDonorRows
from mlxd.caches.donor import Donor, live_columns
from mlxd.caches.packed import Packed, attend, pack
from mlxd.caches.page_table import PageTable
from mlxd.caches.paged import LayerShape, PagedRows
from mlxd.caches.paged_view import ChunkWriter, PagedView, PrefillView, write_position
from mlxd.caches.quantization import Quantization
from mlxd.caches.rotating import RotatingRows


@dataclass(frozen=True, slots=True)
class QuantizedShape(LayerShape):
    """A layer whose keys and values are packed. `dtype` is that of queries, scales and biases."""

    quantization: Quantization

    @property
    def planes(self) -> tuple[tuple[int, mx.Dtype], ...]:
        """Codes, scales and biases of the keys, then those of the values."""
        bits, group = self.quantization.bits, self.quantization.group_size
        return tuple(
            plane
            for dim in (self.key_dim, self.value_dim)
            for plane in (
                (dim * bits // 32, mx.uint32),
                (dim // group, self.dtype),
                (dim // group, self.dtype),
            )
        )


def planes_of(keys: mx.array, values: mx.array, quantization: Quantization) -> list[mx.array]:
    return [*pack(keys, quantization).planes, *pack(values, quantization).planes]


def keys_and_values(planes: Sequence[mx.array], quantization: Quantization) -> tuple[Packed, Packed]:
    keys, key_scales, key_biases, values, value_scales, value_biases = planes
    return (
        Packed(keys, key_scales, key_biases, quantization),
        Packed(values, value_scales, value_biases, quantization),
    )


class QuantizedStandIn:
    """A packed layer inside a decode step: packs one position a row and reads the pages where they lie.

    `new`: planes of that position, as of `QuantizedRows`, once the model gave it.

    The model gets NaN from `update_and_fetch`, in the shape of the pools: only the attention seam may read,
    and it takes the planes from here. Attention outside the seam shows in the self-test.
    """

    def __init__(self, planes: Sequence[mx.array], view: PagedView, quantization: Quantization) -> None:
        self._planes = list(planes)
        self._quantization = quantization
        self.view = view
        self.offset = view.positions
        self.new: list[mx.array] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Takes [B, n_kv_heads, 1, head_dim] of the new position."""
        self.new = planes_of(keys, values, self._quantization)
        if not self.view.attention.writes(*self.pools):
            rows = self.view.write_rows(keys.shape[1])
            pairs = zip(self._planes, self.new, strict=True)
            self._planes = [write_position(pool, new, rows) for pool, new in pairs]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """For layers that attend to this one's keys and values; after its own update."""
        keys, values = self.pools
        return keys.unreadable(), values.unreadable()

    def make_mask(self, num_tokens: int, window_size: int | None = None, return_array: bool = False) -> None:
        return None

    @property
    def pools(self) -> tuple[Packed, Packed]:
        """Keys and values, [num_pages, n_kv_heads, page_size, dim] packed, this step's position written."""
        return keys_and_values(self._planes, self._quantization)

    @property
    def outputs(self) -> list[mx.array]:
        return self._planes


class QuantizedPrefill:
    """A packed layer inside a prefill forward: the chunk, too, is attended to as packing leaves it."""

    def __init__(self, rows: "QuantizedRows", view: PrefillView) -> None:
        self._rows = rows
        self._view = view
        self._fetched: list[mx.array] = []
        self.offset = view.start

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Takes [n, n_kv_heads, L, head_dim]; returns NaN in the shape of all positions attended to."""
        rows, view = self._rows, self._view
        new = planes_of(keys, values, rows.shape.quantization)
        rows.planes = [view.write(pool, n) for pool, n in zip(rows.planes, new, strict=True)]
        self._fetched = [view.read(pool, n) for pool, n in zip(rows.planes, new, strict=True)]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """For layers that attend to this one's keys and values; after its own update."""
        keys, values = self._attended
        return keys.unreadable(), values.unreadable()

    @property
    def _attended(self) -> tuple[Packed, Packed]:
        return keys_and_values(self._fetched, self._rows.shape.quantization)

    def attend(
        self, queries: mx.array, scale: float, mask: mx.array | str | None, sinks: mx.array | None
    ) -> mx.array:
        """Attention of the chunk; see `mlxd.caches.packed.attend`."""
        keys, values = self._attended
        return attend(queries, keys, values, scale, mask, sinks)

    def finish(self) -> None:
        self._fetched = []

    def make_mask(
        self, num_tokens: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        return self._view.mask(num_tokens, window_size, return_array)


@dataclass(frozen=True, slots=True)
class QuantizedDonor:
    """Packed keys and values for queries that are not the layer's own (donor.Donor).

    Attributes:
        keys, values: [num_rows, n_kv_heads, width, dim], oldest first.
    """

    keys: Packed
    values: Packed
    offsets: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]

    def attend(self, queries: mx.array, scale: float) -> mx.array:
        mask = live_columns(self, self.keys.codes.shape[2])
        return attend(queries, self.keys, self.values, scale, mask)

    def rows(self) -> KvDonorRows:
        keys, values = self.keys.dense(), self.values.dense()
        return KvDonorRows(keys, values, self.offsets, self.starts, self.ends)


class QuantizedRows(PagedRows):
    """One full-attention layer, all rows, packed.

    planes: codes, scales and biases of the keys, then of the values, each
        [num_pages + 1, n_kv_heads, page_size, width] with the widths of `QuantizedShape.planes`.
    """

    shape: QuantizedShape

    @property
    def _format(self) -> str:
        quantization = self.shape.quantization
        return f"{quantization.bits}:{quantization.group_size}"

    def signature(self) -> str:
        return f"kv:paged-quant:{self._format}:{self.group.spec.page_size}"

    def _make_slot(self) -> DecodeSlot:
        name, quantization, count = self.group.spec.name, self.shape.quantization, len(self.shape.planes)

        def trace(inputs: Sequence[mx.array], step: DecodeStepInputs) -> QuantizedStandIn:
            return QuantizedStandIn(inputs, step.view(name), quantization)

        return DecodeSlot(key=self.signature(), num_inputs=count, num_outputs=count, trace=trace)

    def keeps_pools(self, writer: ChunkWriter) -> bool:
        return False

    def prefill(self, view: PrefillView) -> QuantizedPrefill:  # type: ignore[override]
        return QuantizedPrefill(self, view)

    def lend(self, tables: Sequence[PageTable], offsets: Sequence[int]) -> Donor:
        """A packed copy; a dense one costs several times as much."""
        keys, values = keys_and_values(self._planes_in_order(tables), self.shape.quantization)
        starts, ends = self._live_columns(tables, offsets)
        return QuantizedDonor(keys, values, tuple(offsets), starts, ends)


class QuantizedRotatingRows(QuantizedRows, RotatingRows):
    """One sliding-window layer, all rows, packed; its pages come and go as `RotatingRows` says."""

    def signature(self) -> str:
        return f"kv:paged-rotating-quant:{self.window}:{self._format}:{self.group.spec.page_size}"
