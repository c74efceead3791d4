"""Keys and values that are dense until a row has a given length, and packed from then on."""

import math
from collections.abc import Sequence
from typing import Literal

import mlx.core as mx

from mlxd.caches.contract import DecodeSlot, DecodeStepInputs, DecodeStepPlan, KvDonorRows, PrefillStandIn
from mlxd.caches.delayed_step import DelayedShape, DelayedStandIn
from mlxd.caches.donor import Donor, MixedDonor
from mlxd.caches.page_table import PageTable
from mlxd.caches.paged import PagedRows, PagedStandIn
from mlxd.caches.paged_view import ChunkWriter, PrefillView
from mlxd.caches.quantized import (
    QuantizedRotatingRows,
    QuantizedRows,
    QuantizedStandIn,
    planes_of,
)
from mlxd.caches.rotating import RotatingRows
from mlxd.caches.rounds import check_window, offsets_kept
from mlxd.caches.row_group import RowGroup
from mlxd.caches.row_offsets import RowOffsets


class DelayedRows(RowOffsets):
    """One layer, all rows, in two pools: dense pages of `group`, packed ones of its successor.

    A row is packed when it has exactly `boundary` positions, whole prefill chunks, whether a chunk or a
    decode step computed the last of them. So the boundary does not depend on its siblings, nor on how much
    of the row was its prompt; a row that is computed anew is packed where it was before.
    """

    state_needs_dispose = False

    def __init__(self, shape: DelayedShape, group: RowGroup, num_pages: int) -> None:
        assert group.successor is not None, "rows need a group to be packed in"
        dense, packed = (
            (PagedRows, QuantizedRows) if group.spec.window is None else (RotatingRows, QuantizedRotatingRows)
        )
        self.shape = shape
        self.group = group
        self.boundary = group.successor.spec.since
        self.dense = dense(shape.dense, group, num_pages)
        self.packed = packed(shape, group.successor, group.successor.num_pages)
        self._forget_rows()

    def _forget_rows(self) -> None:
        self._offsets = ()
        self._round: tuple[int, ...] | None = None
        self._chunk: PrefillView | None = None

    @property
    def storages(self) -> tuple[PagedRows, PagedRows]:
        return self.dense, self.packed

    @property
    def _in_step(self) -> list[PagedRows]:
        """The storages that serve a row of the bound step."""
        return [storage for storage in self.storages if storage.group.width]

    @property
    def row_floors(self) -> tuple[int, ...]:
        """Per row, the shortest prefix from which it may be resumed: where it was packed, else 0."""
        return tuple(self.boundary if offset >= self.boundary else 0 for offset in self._offsets)

    @property
    def minimum_reusable_offset(self) -> int:
        return max(self.row_floors, default=0)

    def max_append_tokens(self) -> float:
        left = [self.boundary - offset for offset in self._offsets if offset < self.boundary]
        return min(left, default=math.inf)

    @property
    def composed(self) -> "DelayedRows":
        return self

    prefill_maintenance = composed

    @property
    def current(self) -> "PagedRows | DelayedRows":
        """The storage that holds all rows; itself while there are rows of both sorts."""
        floors = set(self.row_floors)
        if len(floors) > 1:
            return self
        return self.packed if self.boundary in floors else self.dense

    def signature(self) -> str:
        quantization, spec = self.shape.quantization, self.group.spec
        kind = "delayed-quant" if spec.window is None else f"delayed-rotating-quant:{spec.window}"
        return f"kv:{kind}:{quantization.bits}:{quantization.group_size}:{self.boundary}:{spec.page_size}"

    def bytes_per_token(self) -> int:
        """Of both forms: a row holds both when it is packed."""
        return sum(storage.bytes_per_token() for storage in self.storages)

    def prepare_decode_step(self) -> DecodeStepPlan:
        """Adopts the rows bound to the groups.

        Raises:
            IndexError: no row is bound, or a row would go past its boundary in a speculative round.
        """
        if self._round is not None and any(self._reached(self._round, self.group.offsets)):
            raise IndexError(f"a round may not pass position {self.boundary}: see max_append_tokens")
        self.dense.prepare_decode_step()
        self.packed.prepare_decode_step()
        self._offsets = self.group.offsets
        width = max(storage.group.width for storage in self.storages)
        return DecodeStepPlan(fetch="ring", num_rows=self.group.num_rows, width=width)

    def decode_phase(self) -> Literal["concat", "ring"]:
        return "ring"

    def decode_slot(self, plan: DecodeStepPlan) -> DecodeSlot:
        """The storage's own where only one serves rows of the step."""
        slots = [storage.decode_slot(plan) for storage in self._in_step]
        return slots[0] if len(slots) == 1 else self.group.slot(self.signature(), lambda: self._mixed(*slots))

    def _mixed(self, dense: DecodeSlot, packed: DecodeSlot) -> DecodeSlot:
        split = dense.num_inputs
        dense_trace, packed_trace = dense.trace, packed.trace

        def trace(inputs: Sequence[mx.array], step: DecodeStepInputs) -> DelayedStandIn:
            of_dense, of_packed = dense_trace(inputs[:split], step), packed_trace(inputs[split:], step)
            assert isinstance(of_dense, PagedStandIn)
            assert isinstance(of_packed, QuantizedStandIn)
            return DelayedStandIn(of_dense, of_packed)

        count = dense.num_inputs + packed.num_inputs
        return DecodeSlot(key=self.signature(), num_inputs=count, num_outputs=count, trace=trace)

    def decode_inputs(self, plan: DecodeStepPlan, step: DecodeStepInputs) -> list[mx.array]:
        return [array for storage in self._in_step for array in storage.decode_inputs(plan, step)]

    def commit_decode_step(self, slot: DecodeSlot, outputs: Sequence[mx.array]) -> list[mx.array]:
        at = 0
        for storage in self._in_step:
            count = len(storage.planes)
            storage.commit_decode_step(slot, outputs[at : at + count])
            at += count
        before, self._offsets = self._offsets, self.group.advanced(self._offsets)
        if self._round is None:
            self._pack_reached(before)
        return []

    def keeps_pools(self, writer: ChunkWriter) -> bool:
        """False: what is packed was written by the same forward."""
        return False

    def prefill(self, view: PrefillView) -> PrefillStandIn:
        """`view` is of the group that serves the chunk.

        Raises:
            IndexError: the chunk begins before the boundary and ends after it.
        """
        if view.spec.since:
            return self.packed.prefill(view)
        if max(view.ends) > self.boundary:
            raise IndexError(f"a chunk ends at {max(view.ends)}, past the boundary {self.boundary}")
        self._chunk = view
        return self.dense.prefill(view)

    def begin_prefill(self) -> None:
        self._chunk = None

    def commit_prefill(self, rows: Sequence[int]) -> None:
        """Pack these rows of the forward just built, if their chunk ended at the boundary."""
        if self._chunk is not None:
            tables, ends = self._chunk.tables, self._chunk.ends
            self._pack([tables[row] for row in rows if ends[row] == self.boundary])

    def end_prefill(self) -> None:
        self._chunk = None

    def _reached(self, before: Sequence[int], now: Sequence[int]) -> list[bool]:
        return [was < self.boundary <= end for was, end in zip(before, now, strict=True)]

    def _pack_reached(self, before: Sequence[int]) -> None:
        reached = self._reached(before, self._offsets)
        self._pack([table for table, due in zip(self.group.tables, reached, strict=True) if due])

    def _pack(self, tables: Sequence[PageTable]) -> None:
        """Quantise these rows' dense pages, all full, into their packed ones; evaluation is begun."""
        sources, targets = list[int](), list[int]()
        for table in tables:
            packed = table.successor
            assert packed is not None
            skip = packed.first_page - table.first_page
            pages = table.pages[skip : skip + len(packed.pages)]
            sources += pages
            targets += packed.pages[: len(pages)]
        if not sources:
            return
        source, target = mx.array(sources, dtype=mx.int32), mx.array(targets, dtype=mx.int32)
        keys, values = (plane[source] for plane in self.dense.planes)
        new = planes_of(keys, values, self.shape.quantization)
        for plane, numbers in zip(self.packed.planes, new, strict=True):
            plane[target] = numbers
        # Begun now, so that it has read the dense pools before the next step's writes want them alone.
        mx.async_eval(new)

    def state(self) -> list[mx.array]:
        return [array for storage in self.storages for array in storage.state()]

    def is_trimmable(self) -> bool:
        """While no row is packed and no page has left a window."""
        return not self.minimum_reusable_offset and self.dense.is_trimmable()

    def trim(self, num_tokens: int, *, bypass: bool = False) -> None:
        """Positions only; `bypass` lets packed rows drop those after their boundary.

        Raises:
            ValueError: not trimmable, or a row would end before its boundary or in pages handed back.
        """
        if not bypass and not self.is_trimmable():
            raise ValueError("packed rows can no longer be trimmed")
        window = self.group.spec.window
        for table, offset, floor in zip(self.group.tables, self._offsets, self.row_floors, strict=True):
            left = max(0, offset - num_tokens)
            oldest = 0 if window is None else max(0, left - window)
            _, held = self._held(table, offset)
            if left < floor or oldest < held.start:
                raise ValueError(f"cannot trim a row of {offset} by {num_tokens}: it was packed at {floor}")
        self._offsets = tuple(max(0, offset - num_tokens) for offset in self._offsets)

    def spec_round_begin(self) -> None:
        """Rows that reach their boundary in the round are packed when it is resolved."""
        self._round = self._offsets
        for table in self._tables_of_both:
            table.hold()

    def spec_round_commit(self) -> None:
        if self._round is not None:
            self._end_round(self._round, self._offsets)

    def spec_round_rollback(self, keep: Sequence[int]) -> None:
        """As `PagedRows.spec_round_rollback`."""
        kept = offsets_kept(self._round, self._offsets, keep)
        assert self._round is not None
        self._end_round(self._round, kept)

    def _end_round(self, before: Sequence[int], offsets: tuple[int, ...]) -> None:
        for table, packed, offset in zip(self.group.tables, self._successors, offsets, strict=True):
            table.let_go(min(offset, self.boundary - 1))  # a row that is packed now is packed from there
            packed.let_go(offset)
        for table, offset in zip(self.group.tables, offsets, strict=True):
            check_window(self._held(table, offset)[1], offset)
        self._offsets, self._round = offsets, None
        self._pack_reached(before)

    @property
    def _successors(self) -> list[PageTable]:
        return [table.successor for table in self.group.tables if table.successor is not None]

    @property
    def _tables_of_both(self) -> list[PageTable]:
        return [*self.group.tables, *self._successors]

    def capture_donor_rows(self) -> KvDonorRows:
        """A dense copy; later appends, leaves and disposal do not reach it."""
        return self.capture_donor_attention().rows()

    def capture_donor_attention(self) -> Donor:
        """Each row as it is stored; later appends, conversions, leaves and disposal do not reach it."""
        held = [self._held(*row) for row in zip(self.group.tables, self._offsets, strict=True)]
        parts, places = list[Donor](), list[list[int]]()
        for storage in self.storages:
            if rows := [row for row, (holder, _) in enumerate(held) if holder is storage]:
                tables = [held[row][1] for row in rows]
                parts.append(storage.lend(tables, [self._offsets[row] for row in rows]))
                places.append(rows)
        return MixedDonor(parts, places)

    def _held(self, table: PageTable, offset: int) -> tuple[PagedRows, PageTable]:
        """Where the newest positions of a row of so many lie.

        A row that was just packed, whose next position does not read all of them, has them dense alone.
        """
        if offset < self.boundary:
            return self.dense, table
        packed, window = table.successor, self.group.spec.window
        assert packed is not None
        oldest = 0 if window is None else max(0, offset - window)
        is_whole = packed.start <= oldest and offset <= packed.end
        return (self.packed, packed) if is_whole or not table.pages else (self.dense, table)

    def reset(self) -> None:
        for storage in self.storages:
            storage.reset()
        self._forget_rows()

    def dispose(self) -> None:
        for storage in self.storages:
            storage.dispose()
        self._forget_rows()
