"""Full-attention keys and values in pages."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxd.caches.contract import DecodeSlot, DecodeStepInputs, DecodeStepPlan, KvDonorRows
from mlxd.caches.donor import DenseDonor, Donor, padded_pages, pages_in_order
from mlxd.caches.page_table import PageTable
from mlxd.caches.paged_view import ChunkWriter, PagedView, PrefillView, write_position
from mlxd.caches.pooled import PooledRows
from mlxd.caches.rounds import check_window, offsets_kept
from mlxd.caches.row_group import RowGroup


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's keys and values: heads, widths, dtype. `index`: place in the model's cache list."""

    index: int
    n_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype

    @property
    def planes(self) -> tuple[tuple[int, mx.Dtype], ...]:
        """Width and dtype of each array that stores the layer, in the order of `PagedRows.planes`."""
        return (self.key_dim, self.dtype), (self.value_dim, self.dtype)

    @property
    def bytes_per_token(self) -> int:
        return self.n_kv_heads * sum(width * dtype.size for width, dtype in self.planes)


class PagedStandIn:
    """A paged layer inside a decode step: writes one position a row, reads as the variant says.

    `new`: that position's keys and values, [B, n_kv_heads, 1, head_dim], once the model gave them.

    `keys` may be assigned, as models do to tie other arrays to them; what is assigned to `values` is dropped:
    a model that clears what it never reads would have a whole pool written at every step.
    """

    def __init__(self, keys: mx.array, values: mx.array, view: PagedView) -> None:
        self.keys = keys
        self._values = values
        self.view = view
        self.offset = view.positions
        self.new: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Takes [B, n_kv_heads, 1, head_dim] of the new position; returns what the variant reads from."""
        self.new = keys, values
        if not self.view.attention.writes(self.keys, self._values):
            rows = self.view.write_rows(keys.shape[1])
            self.keys = write_position(self.keys, keys, rows)
            self._values = write_position(self._values, values, rows)
        self._fetched = self.view.attention.fetch(self.keys, self._values, self.view)
        return self._fetched

    @property
    def values(self) -> mx.array:
        return self._values

    @values.setter
    def values(self, values: mx.array) -> None: ...

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """For layers that attend to this one's keys and values; after its own update."""
        return self._fetched

    def make_mask(
        self, num_tokens: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | None:
        return self.view.attention.mask(self.view)

    @property
    def outputs(self) -> tuple[mx.array, mx.array]:
        return self.keys, self._values


class PagedPrefill:
    """A paged layer inside a prefill forward: writes the chunk, attends by fused causal attention."""

    def __init__(self, rows: "PagedRows", view: PrefillView) -> None:
        self._rows = rows
        self._view = view
        self._written: mx.array | None = None
        self.offset = view.start

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        rows, view, new = self._rows, self._view, (keys, values)
        if view.writer is not None:
            self._written = view.writer.write(view, rows.planes, new)
        else:
            rows.planes = [view.write(pool, x) for pool, x in zip(rows.planes, new, strict=True)]
        self._fetched = view.read(rows.keys, keys), view.read(rows.values, values)
        return self._fetched

    @property
    def keys(self) -> mx.array:
        """The whole pool; may be assigned, `values` too, as in `PagedStandIn`."""
        return self._rows.keys

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self._rows.planes[0] = keys

    @property
    def values(self) -> mx.array:
        return self._rows.values

    @values.setter
    def values(self, values: mx.array) -> None: ...

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """For layers that attend to this one's keys and values; after its own update."""
        return self._fetched

    def finish(self) -> mx.array | None:
        self._fetched = mx.array(0), mx.array(0)
        return self._written

    def make_mask(
        self, num_tokens: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        return self._view.mask(num_tokens, window_size, return_array)


class PagedRows(PooledRows):
    """One full-attention layer, all rows: a pool of pages whose tables live in its group.

    planes: keys [num_pages + 1, n_kv_heads, page_size, key_dim], and values, the same with value_dim.
    """

    def __init__(self, shape: LayerShape, group: RowGroup, num_pages: int) -> None:
        lead = shape.n_kv_heads, group.spec.page_size
        super().__init__(group, num_pages, [((*lead, width), dtype) for width, dtype in shape.planes])
        self.shape = shape

    def _forget_rows(self) -> None:
        super()._forget_rows()
        self._round: tuple[int, ...] | None = None

    @property
    def keys(self) -> mx.array:
        return self.planes[0]

    @property
    def values(self) -> mx.array:
        return self.planes[1]

    def signature(self) -> str:
        return f"kv:paged:{self.group.spec.page_size}"

    def bytes_per_token(self) -> int:
        return self.shape.bytes_per_token

    def decode_slot(self, plan: DecodeStepPlan) -> DecodeSlot:
        return self.group.slot(self.signature(), self._make_slot)

    def _make_slot(self) -> DecodeSlot:
        name = self.group.spec.name

        def trace(inputs: Sequence[mx.array], step: DecodeStepInputs) -> PagedStandIn:
            keys, values = inputs
            return PagedStandIn(keys, values, step.view(name))

        return DecodeSlot(key=self.signature(), num_inputs=2, num_outputs=2, trace=trace)

    def keeps_pools(self, writer: ChunkWriter) -> bool:
        return writer.serves(self.keys, self.values)

    def prefill(self, view: PrefillView) -> PagedPrefill:
        return PagedPrefill(self, view)

    def is_trimmable(self) -> bool:
        return True

    def trim(self, num_tokens: int, *, bypass: bool = False) -> None:
        """Positions only: the dropped columns are dead and the next append overwrites them."""
        self._offsets = tuple(max(0, offset - num_tokens) for offset in self._offsets)

    def spec_round_begin(self) -> None:
        """Pages that its rows hand back in the round can come back."""
        self._round = self._offsets
        for table in self.group.tables:
            table.hold()

    def spec_round_commit(self) -> None:
        if self._round is not None:
            self._end_round(self._offsets)

    def spec_round_rollback(self, keep: Sequence[int]) -> None:
        """Positions only; pages that the rows' windows reach into come back.

        Raises:
            ValueError: no round is open, a row would keep more than it appended, or its window would reach
                into pages that were handed back before it was in the round.
        """
        self._end_round(offsets_kept(self._round, self._offsets, keep))

    def _end_round(self, offsets: tuple[int, ...]) -> None:
        for table, offset in zip(self.group.tables, offsets, strict=True):
            table.let_go(offset)
        for table, offset in zip(self.group.tables, offsets, strict=True):
            check_window(table, offset)
        self._offsets = offsets
        self._round = None

    def capture_donor_rows(self) -> KvDonorRows:
        """A dense copy; later appends, leaves and disposal do not reach it."""
        return self.capture_donor_attention().rows()

    def capture_donor_attention(self) -> Donor:
        """A copy in the layer's own format; later appends, leaves and disposal do not reach it."""
        return self.lend(self.group.tables, self._offsets)

    def lend(self, tables: Sequence[PageTable], offsets: Sequence[int]) -> Donor:
        """A copy of what rows of so many positions hold in these pages, gathered into order."""
        keys, values = self._planes_in_order(tables)
        starts, ends = self._live_columns(tables, offsets)
        return DenseDonor(keys, values, tuple(offsets), starts, ends)

    def _planes_in_order(self, tables: Sequence[PageTable]) -> list[mx.array]:
        """Each plane as [num_rows, n_kv_heads, T * page_size, width]: a copy of the rows' pages."""
        index = padded_pages(tables)
        return [pages_in_order(plane, index) for plane in self.planes]

    def _live_columns(
        self, tables: Sequence[PageTable], offsets: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """First and one past the last column of each row that is in its window, in its pages."""
        window = self.group.spec.window
        ends = tuple(offset - table.start for table, offset in zip(tables, offsets, strict=True))
        return tuple(0 if window is None else max(0, end - window) for end in ends), ends
